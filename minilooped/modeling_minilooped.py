"""minilooped for transformers: a thin wrapper around model.py.

`minilooped export` puts copies of this file and of model.py beside a model's weights. The folder needs no other code,
and transformers runs the two files where the user trusts them:

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)            # as many loops as trained
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, n_loop=8)  # more, the same weights
    model(input_ids).logits, model(input_ids, n_loop=2).logits                              # (B, T, V)
    model.generate(input_ids, max_new_tokens=20)

Generation runs the whole window for every token, because transformers' cache has one slot per layer and a looped model
needs one per visit. `LoopedGPT.generate` has a cache of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import can_return_tuple

from .model import LoopedConfig, LoopedGPT, rotary_table


class MiniloopedConfig(PreTrainedConfig):
    """The trained model's `LoopedConfig`, and the number of loops to run it for."""

    model_type = "minilooped"

    def __init__(self, looped: dict[str, Any] | None = None, n_loop: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        model = LoopedConfig(**looped or {})
        self.looped = looped or {}  # the fields of LoopedConfig
        self.n_loop = model.n_loop if n_loop is None else n_loop  # the trained count stays in `looped`
        # What other tools ask for, under the names they know.
        self.vocab_size, self.max_position_embeddings = model.vocab_size, model.block_size
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = model.n_embd, model.n_layer, model.n_head


class MiniloopedForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LoopedGPT`, as `model`, behind the interface of transformers."""

    config_class = MiniloopedConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: MiniloopedConfig):
        super().__init__(config)
        self.model = LoopedGPT(LoopedConfig(**config.looped))
        self.generation_config.use_cache = False
        self.post_init()

    def _init_weights(self, module: nn.Module):
        """LoopedGPT draws its own weights. This fills the buffers that no file holds: collected loads, rotary table."""
        if isinstance(module, LoopedGPT):
            module.forget_loads()
            if module.rope is not None:
                table = rotary_table(module.config.block_size, module.config.n_embd // module.config.n_head)
                with torch.no_grad():
                    module.rope.copy_(table)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.wte

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        n_loop: int | None = None,
    ) -> CausalLMOutput:
        """Logits (B, T, V), and the loss in nats per token if there are labels.

        input_ids: (B, T) int64, T <= block_size; labels: (B, T) int64, those of the same positions, -100 is ignored.
        attention_mask: (B, T), 1 for a token and 0 for padding. Padding after the text changes nothing before it;
            padding before or inside it raises a ValueError.
        n_loop: loops for this call; None: those of the config.
        """
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise ValueError("this model cannot skip padding in front of a token: give texts of equal length instead")
        # transformers shifts labels inside the model; ours takes the next tokens.
        targets = None if labels is None else F.pad(labels[:, 1:], (0, 1), value=-100)
        logits, loss = self.model(input_ids, targets, n_loop=self.config.n_loop if n_loop is None else n_loop)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, n_loop: int | None = None, **_: Any
    ) -> dict[str, Any]:
        """The window for the next token: the last block_size tokens."""
        size = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -size:]
        return {"input_ids": input_ids[:, -size:], "attention_mask": mask, "n_loop": n_loop}
