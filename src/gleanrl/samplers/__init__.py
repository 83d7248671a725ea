"""Where tokens come from; see `gleanrl.protocols.Sampler`."""

SAMPLERS = {
    "transformers": "gleanrl.samplers.transformers:TransformersSampler",
    "vllm": "gleanrl.samplers.vllm:VllmSampler",
    "openai": "gleanrl.samplers.openai:OpenAISampler",
}
"""Those of the house, by `sampler.name`."""
