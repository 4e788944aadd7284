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

A model of characters has no token that ends a text, and tools around transformers ask for one. Its tokenizer therefore
has `<|endoftext|>` behind its last character. The model reads this token as it reads the opening of a text
(`MiniloopedConfig.read_end_as`), never predicts it, and ignores it as a label.
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
    """The trained model's `LoopedConfig`, the number of loops to run it for, and how to read a token of no text."""

    model_type = "minilooped"

    def __init__(
        self,
        looped: dict[str, Any] | None = None,
        n_loop: int | None = None,
        read_end_as: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        model = LoopedConfig(**looped or {})
        self.looped = looped or {}  # the fields of LoopedConfig
        self.n_loop = model.n_loop if n_loop is None else n_loop  # the trained count stays in `looped`
        self.read_end_as = read_end_as  # the token to read in the place of one of no text; None: there is no such token
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
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        n_loop: int | None = None,
    ) -> CausalLMOutput:
        """Logits (B, T, V), and the loss in nats per token if there are labels.

        input_ids: (B, T) int64, T <= block_size; labels: (B, T) int64, those of the same positions, -100 is ignored.
        attention_mask: (B, T), 1 for a token and 0 for padding. Padding after the text changes nothing before it.
        position_ids: (B, T) or (T,), 0, 1, 2, ... wherever there is a token.
        output_hidden_states: also give N + 1 streams (B, T, C): the embedding, and the stream after every loop.
        n_loop: loops for this call; None: those of the config.
        use_cache: without effect, since nothing is cached. The other arguments are there for tools that name them all.

        Raises ValueError for padding before or inside a text, for other positions, and for what the model has not:
        embeddings as inputs, attention weights as outputs, a cache.
        """
        self._refuse_unsupported(input_ids, past_key_values, inputs_embeds, output_attentions)
        assert input_ids is not None
        self._refuse_gaps(input_ids, attention_mask, position_ids)
        idx, targets = input_ids, None
        if self.config.read_end_as is not None:
            idx = input_ids.masked_fill(self._is_end(input_ids), self.config.read_end_as)
        if labels is not None:  # transformers shifts labels inside the model; ours takes the next tokens
            targets = F.pad(labels.masked_fill(self._is_end(labels), -100)[:, 1:], (0, 1), value=-100)
        n_loop = self.config.n_loop if n_loop is None else n_loop
        shown = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        logits, loss, *states = self.model(idx, targets, n_loop=n_loop, return_states=shown)
        hidden_states = (self.model.embed(idx), *states[0]) if shown else None
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=hidden_states)

    def _refuse_unsupported(self, input_ids: Any, past_key_values: Any, inputs_embeds: Any, output_attentions: Any):
        given = dict(
            inputs_embeds=inputs_embeds is not None,
            past_key_values=past_key_values is not None and past_key_values.get_seq_length() > 0,
            output_attentions=self.config.output_attentions if output_attentions is None else output_attentions,
        )
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"a looped model does not support {' and '.join(names)}: leave that out")
        if input_ids is None:
            raise ValueError("input_ids is missing: give token ids (B, T)")

    def _refuse_gaps(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None):
        """A text has to begin at its row's first place, and its tokens to follow each other."""
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if real.shape != input_ids.shape:
            raise ValueError(f"attention_mask {tuple(real.shape)} must have the shape of input_ids, (B, T)")
        if (real[:, 1:] > real[:, :-1]).any():
            raise ValueError(
                "this model cannot skip padding in front of a token: pad on the right, or give texts of one length, "
                "or one text at a time"
            )
        own = torch.arange(input_ids.shape[1], device=input_ids.device)
        if position_ids is not None and ((position_ids != own) & (real > 0)).any():
            raise ValueError("position_ids must count 0, 1, 2, ... in every row: leave them out")

    def _is_end(self, ids: Tensor) -> Tensor:
        """Where ids (B, T) have the tokenizer's own token, the first one beyond the vocabulary."""
        return (ids == self.config.vocab_size) & (self.config.read_end_as is not None)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, n_loop: int | None = None, **_: Any
    ) -> dict[str, Any]:
        """The window for the next token: the last block_size tokens."""
        size = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -size:]
        return {"input_ids": input_ids[:, -size:], "attention_mask": mask, "n_loop": n_loop}
