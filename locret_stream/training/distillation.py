"""One step of tuning: the loss of a batch and its gradient for the heads. Knows no files and no optimiser.

Every group of examples goes through the frozen model twice. The teacher keeps everything: its hidden states are what
the answers are expected to be, and inside its layers the first stage's labels are made. The student evicts softly, or
its units fade (see `student`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment, LayerCall, differentiable
from locret_stream.training.background import Rivals
from locret_stream.training.config import TrainConfig, TuneConfig
from locret_stream.training.data import Example
from locret_stream.training.labels import answer_rows
from locret_stream.training.loss import layer_terms
from locret_stream.training.steps import groups_of, visit_labels
from locret_stream.training.student import Fading, Student, divergence, over_capacity


class Distillation:
    """Takes the gradient of KL(teacher || student) + weight * the first stage's loss, for the heads alone.

    Args:
        config: weight and chunk size; `first_stage`: how the first stage makes labels and weighs its terms.
        budgets: [L] units by layer; `protected`: (sinks, stabilizers). longest: tokens of the longest example.
    """

    def __init__(self, attachment: Attachment, heads: RetainingHeads, config: TuneConfig, first_stage: TrainConfig,
                 budgets: Sequence[int], protected: tuple[int, int], longest: int):
        self._attachment, self._heads, self._config, self._first_stage = attachment, heads, config, first_stage
        self._budgets, self._block_bytes = budgets, config.block_mib * 2**20
        kind = Fading if heads.config.output == "retention" else Student
        self._student = kind(attachment, heads, budgets, config.chunk_size, *protected, longest, self._block_bytes)

    def begin_behind(self, rivals: Mapping[int, Rivals]) -> None:
        """Let examples begin behind these units of a background, by layer; behind none if empty."""
        self._student.rivals = rivals

    def backward(self, batch: Sequence[Example], temperature: float) -> tuple[float, float, float]:
        """Add the gradient of a batch to the heads'; (divergence, regression, smoothing), the terms of its loss."""
        terms = torch.zeros(3, dtype=torch.float64, device=self._attachment.device)
        for group in groups_of(batch, len(batch)):
            share = len(group) / len(batch)
            expected, first_stage_terms = self._teach(group, share)
            terms[1:] += first_stage_terms
            terms[0] += share * self._learn(group, expected, share, temperature)
        kl, regression, smoothing = terms.tolist()
        return kl, regression, smoothing

    def _teach(self, group: list[Example], share: float) -> tuple[Tensor, Tensor]:
        """Run the teacher, and take the gradient of the first stage's loss: (hidden states [B, T, hidden], the terms
        [regression, smoothing], which for output "retention" are the capacity loss and 0)."""
        layers, alpha, terms = len(self._heads.config.layers_with_head), self._first_stage.alpha, list[Tensor]()

        def visit(call: LayerCall, labels: Tensor, valid: Tensor) -> None:
            if not self._heads.config.has_head(call.layer):
                return
            with torch.enable_grad():
                regression, smoothing = self._layer_terms(call, labels, valid)
                (share * self._config.weight * (regression / layers + alpha * smoothing)).backward()
            terms.append(share * torch.stack([regression.detach() / layers, smoothing.detach()]).double())

        expected = visit_labels(self._attachment, self._student.absolute, group, visit, self._first_stage)
        return expected, torch.stack(terms).sum(0)

    def _layer_terms(self, call: LayerCall, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's head learns beside the divergence: the terms of the first stage, or the capacity loss."""
        if self._heads.config.output == "retention":
            rates = F.logsigmoid(self._heads.score(call.layer, call.q, call.k, call.own_v, call.hidden))
            return over_capacity(rates, self._budgets[call.layer], self._block_bytes), rates.new_zeros(())
        scores = self._heads.score(call.layer, call.q, call.k, call.own_v, call.hidden)
        if self._first_stage.label == "attention":
            scores = self._heads.averaged(scores)
        scores = scores[..., :labels.shape[-1]]
        return layer_terms(scores, labels, valid, self._first_stage.label)

    def _learn(self, group: list[Example], expected: Tensor, share: float, temperature: float) -> float:
        """Run the student, and take the gradient of its divergence from the `expected` hidden states."""
        attachment, kl = self._attachment, torch.zeros((), dtype=torch.float32, device=self._attachment.device)
        ids = torch.stack([example.ids for example in group]).to(attachment.device)
        with torch.enable_grad(), differentiable(attachment):
            hidden = self._student.hidden(ids, temperature)
            for teacher, student, example in zip(expected, hidden, group, strict=True):
                rows = answer_rows(example.answer_spans)[0].to(attachment.device)
                kl = kl + divergence(attachment, teacher[rows], student[rows], self._block_bytes) / len(group)
            if kl.requires_grad:  # else nothing was evicted
                (share * kl).backward()
        return kl.item()
