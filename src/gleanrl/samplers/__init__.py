"""Where tokens come from; see `gleanrl.protocols.Sampler`."""

SAMPLERS = {
    "transformers": "gleanrl.samplers.transformers:TransformersSampler",
    "vllm": "gleanrl.samplers.vllm:VllmSampler",
}
"""Those of the house, by `sampler.name`."""
