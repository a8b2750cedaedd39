"""Known architectures that are not supported, and the missing features. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MLA = "multi-head latent attention (MLA)"
_IMAGES = "images"
_STATES = "layers with a recurrent state instead of KV"
NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": f"sparse {_MLA}",
        "GlmMoeDsaForCausalLM": f"sparse {_MLA}",
        "Glm4vMoeForConditionalGeneration": _IMAGES,
        "Gemma3nForConditionalGeneration": "layers that share KV, and embeddings of layers",
        "KimiK25ForConditionalGeneration": _IMAGES,
        "Llama4ForCausalLM": "chunked attention",
        "Llama4ForConditionalGeneration": f"chunked attention, and {_IMAGES}",
        "MllamaForConditionalGeneration": _IMAGES,
        "Qwen2VLForConditionalGeneration": _IMAGES,
        "Qwen2_5_VLForConditionalGeneration": _IMAGES,
        "Qwen3VLForConditionalGeneration": _IMAGES,
        "Qwen3VLMoeForConditionalGeneration": _IMAGES,
        "Qwen3NextForCausalLM": _STATES,
        "Qwen3_5ForConditionalGeneration": _STATES,
        "Qwen3_5MoeForConditionalGeneration": _STATES,
        "NemotronHForCausalLM": _STATES,
        "FalconH1ForCausalLM": _STATES,
        "Phi4MMForCausalLM": f"{_IMAGES}, and longrope",
        "PhiMoEForCausalLM": "routing by sparse mixing, and longrope",
        "CohereForCausalLM": "attention and MLP in parallel",
        "Cohere2ForCausalLM": "attention and MLP in parallel",
        "GraniteForCausalLM": "scales of embeddings, attention, residuals and logits",
        "GraniteMoeHybridForCausalLM": _STATES,
        "GPT2LMHeadModel": "learned position embeddings",
    }
)
