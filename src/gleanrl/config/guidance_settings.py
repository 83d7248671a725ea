"""What of past experience is shown to rollouts; `gleanrl.experience.guidance.guidance` reads it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from gleanrl.config.settings import Fraction, Positive, PositiveFloat, Settings


class GuidanceSettings(Settings):
    """Experience shown to part of the rollouts; docs/howto/guidance.md."""

    enabled: bool = False
    guided_share: Fraction = 0.5
    """Share of each group's fresh members that are shown experience, rounded down."""
    mode: Literal["keep", "discard", "mixed"] = "discard"
    """keep: trained with the text in the prompt, on-policy. discard: trained without it, off-policy (at least two
    members of a group stay unguided, for its baseline). mixed: by task."""
    keep_share: Fraction = 0.5
    """Share of the tasks that keep it, for `mode = "mixed"`."""
    retriever: str = "bm25"
    """bm25, reme, or an import path of a `Retriever`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the retriever; `url` and `workspace` of reme."""
    k: Positive = 1
    """Experiences shown."""
    template: str = "Experience from similar tasks:\n{experience}\n\n{prompt}"
    """What the last user message of the opening becomes."""
    prompt_share: Fraction = 0.5
    """Share of the model's context that a guided opening may fill; experiences that do not fit are left out."""
    timeout_s: PositiveFloat = 10.0
    """How long a retrieval may take before the group is played without."""

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str) -> str:
        for name in ("{experience}", "{prompt}"):
            if template.count(name) != 1:
                raise ValueError(f"must hold {name} once")
        return template
