"""Both phases of the training. Each writes a checkpoint every so many steps, and may be stopped there."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tutorials.eye_training.canvases import Material, paint
from tutorials.eye_training.language import Language
from tutorials.eye_training.model import TrainedEye
from tutorials.eye_training.scenes import WORDS, Scene, random_question, random_scene

REPORT = 50
"""Steps between two lines, and between two checkpoints of the second phase."""


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate: up in the first twentieth, then down by a cosine."""
    warm = max(1, steps // 20)
    return peak * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


class Words:
    """The embeddings of SmolLM2 for the words of each attribute, as targets of the first phase.

    The k-th embedding of an image is to be the word of its attribute k mod 6.
    """

    def __init__(self, language: Language) -> None:
        self._words = [language.words(words) for words in WORDS]
        self._variance = torch.cat(self._words).var()

    def loss(self, images: Tensor, scenes: list[Scene]) -> tuple[Tensor, Tensor]:
        """(loss, right [scenes, 6]). The loss: cross-entropy of the distances to all words of the attribute,
        and a little of the distance to the right one."""
        loss, right = images.new_zeros(()), []
        for number, (words, table) in enumerate(zip(WORDS, self._words)):
            target = torch.tensor([words.index(scene.attributes[number]) for scene in scenes])
            mine = images[:, number :: len(WORDS)]
            distances = (mine[:, :, None] - table).square().sum(-1) / (40 * self._variance)
            loss = loss + functional.cross_entropy(
                -distances.flatten(0, 1), target.repeat_interleave(mine.shape[1])
            )
            nearest = distances.gather(2, target[:, None, None].expand(-1, mine.shape[1], 1))
            loss = loss + 0.02 * nearest.mean()
            right.append(distances.mean(1).argmin(-1) == target)
        return loss, torch.stack(right, dim=1)


def learn_words(folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int) -> None:
    """The first phase: canvases alone, no language model but its table of embeddings."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    eye, words = TrainedEye(), Words(Language())
    optimizer = torch.optim.AdamW(eye.parameters(), lr=1e-3, weight_decay=0.05)
    start = time.perf_counter()
    for step in range(steps):
        scenes = [random_scene(rng) for _ in range(batch)]
        optimizer.param_groups[0]["lr"] = rate(step, steps, 1e-3)
        loss, right = words.loss(eye(paint(scenes, material[0], rng)), scenes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        if step % REPORT == REPORT - 1:
            print(_line(step, loss, start), _shares(right), flush=True)
        if step % 250 == 249 or step == steps - 1:
            eye.save(folder, torch.float32)
            with torch.no_grad():
                held_out = random.Random(1)
                scenes = [random_scene(held_out) for _ in range(500)]
                _, right = words.loss(eye(paint(scenes, material[1], held_out)), scenes)
            print("held out:", _shares(right), flush=True)


def learn_language(
    folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int, peak: float = 5e-4
) -> list[float]:
    """The second phase, from a folder: through the frozen language model. Returns the losses."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    eye, language = TrainedEye().load(folder), Language()
    optimizer = torch.optim.AdamW(eye.parameters(), lr=peak, weight_decay=0.05)
    start, losses = time.perf_counter(), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps, peak)
        scenes = [random_scene(rng) for _ in range(batch)]
        questions = [random_question(rng) for _ in scenes]
        answers = [scene.answer(question) for scene, question in zip(scenes, questions)]
        loss = language.loss(eye(paint(scenes, material[0], rng)), questions, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % REPORT == REPORT - 1 or step == steps - 1:
            mean = sum(losses[-REPORT:]) / len(losses[-REPORT:])
            print(_line(step, torch.tensor(mean), start), flush=True)
            eye.save(folder, torch.float32)
    return losses


def _line(step: int, loss: Tensor, start: float) -> str:
    return f"step {step + 1}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s"


def _shares(right: Tensor) -> str:
    names = ("colour", "digit", "relation", "second colour", "second digit", "ground")
    return ", ".join(f"{name} {share:.3f}" for name, share in zip(names, right.float().mean(0).tolist()))
