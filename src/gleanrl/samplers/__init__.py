"""Samplers, which generate the model's tokens. The interface is `gleanrl.protocols.Sampler`.

This module lists the built-in samplers by name, and checks the name in a configuration. It imports none of them,
because some import torch or vLLM.
"""

import sys
from importlib.util import find_spec

from gleanrl.config.settings import Config, SamplerSettings
from gleanrl.protocols import Sampler, SamplingParams
from gleanrl.schedule.schedule import Schedule
from gleanrl.types import IntArray
from gleanrl.utils.errors import UserError
from gleanrl.utils.importing import load_object
from gleanrl.utils.text import nearest

SAMPLERS = {
    "transformers": "gleanrl.samplers.transformers:TransformersSampler",
    "vllm": "gleanrl.samplers.vllm:VllmSampler",
    "openai": "gleanrl.samplers.openai:OpenAISampler",
}
"""Value of ``sampler.name`` -> import path of the built-in sampler."""


_OF_THE_RUN = frozenset(
    {
        *("model", "max_rows", "max_context", "deterministic", "inflight", "dtype"),
        *("device_lock", "timeline", "lora_rank", "lora_targets"),
    }
)
"""Arguments of a sampler that a run gives it, which ``sampler.options`` may not contain."""


def check(settings: SamplerSettings) -> None:
    """Check that the sampler of ``settings`` can be used.

    Raises:
        UserError: if its name is neither a built-in sampler nor the import path of an object, the class lacks a method
            of `Sampler`, vLLM is needed and not installed, or an option is not one of the sampler.
    """
    name = settings.name
    for section, options in (("options", settings.options), ("evaluation_options", settings.evaluation_options)):
        if taken := sorted(_OF_THE_RUN & options.keys()):
            raise UserError(f"sampler.{section}: {taken[0]} follows from the run's other settings")
        if name == "transformers":
            if unknown := sorted(options.keys() - {"prefill_tokens"}):
                raise UserError(f"sampler.{section}: transformers has no {unknown[0]!r}, only prefill_tokens")
            tokens = options.get("prefill_tokens", 1)
            if type(tokens) is not int or tokens < 1:
                raise UserError(f"sampler.{section}.prefill_tokens = {tokens!r}: must be a whole number from 1")
    if name in SAMPLERS:
        if name == "vllm" and "vllm" not in sys.modules and find_spec("vllm") is None:
            raise UserError("sampler.name = 'vllm' needs vLLM: pip install 'gleanrl[vllm]'")
    elif ":" in name:
        load_object(name, Sampler)
    else:
        hint = nearest(name, SAMPLERS) or f"; there are {', '.join(SAMPLERS)}, or give `package.module:Class`"
        raise UserError(f"sampler.name: no sampler {name!r}{hint}")


def is_deterministic(config: Config) -> bool:
    """Return the value of ``sampler.deterministic``, which is true for "auto" if no schedule lets groups be stale."""
    given = config.sampler.deterministic
    return Schedule.from_settings(config.schedule).staleness == 0 if given == "auto" else given


def shares_with_evaluation(config: Config) -> bool:
    """Return the value of ``sampler.share_with_evaluation``, with "auto" resolved.

    Raises `UserError` if it is true and other settings contradict it.
    """
    sampler, given = config.sampler, config.sampler.share_with_evaluation
    # What a server computes together depends on timing in any case.
    deterministic = sampler.name != "openai" and is_deterministic(config)
    if given is True and sampler.evaluation_options:
        raise UserError(
            "sampler.evaluation_options need a sampler for evaluations: not with share_with_evaluation = true"
        )
    if given is True and deterministic:
        raise UserError(
            "sampler.share_with_evaluation = true makes results depend on timing: set sampler.deterministic = false"
        )
    alone = not (sampler.evaluation_options or deterministic)
    return given if given != "auto" else alone and sampler.name in ("vllm", "openai")


def answer_limit(prompt: IntArray, params: SamplingParams, max_context: int) -> int:
    """Return the largest number of tokens that may be sampled after ``prompt``.

    Raises `ValueError` if ``prompt`` is empty, or if ``params`` or the context of ``max_context`` tokens leave no room
    for a sampled token.
    """
    limit = min(params.max_tokens, max_context - prompt.size)
    if prompt.size < 1 or limit < 1:
        raise ValueError(
            f"a prompt of {prompt.size} tokens with max_tokens={params.max_tokens} leaves nothing to sample "
            f"in a context of {max_context}"
        )
    return limit
