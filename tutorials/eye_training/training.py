"""Both phases of the training. Each writes a checkpoint every so many steps, and may be stopped there."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutorials.eye_training.canvases import Material, paint
from tutorials.eye_training.language import Language
from tutorials.eye_training.model import NUM_EMBEDS, WIDTH, TrainedEye
from tutorials.eye_training.scenes import Scene, random_question, random_scene

REPORT = 50
"""Steps of the first phase between two lines."""


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate: up in the first twentieth, then down by a cosine."""
    warm = max(1, steps // 20)
    return peak * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


class Words:
    """The first phase's targets: an image's embeddings are to be those of its caption's tokens, in order.

    After the caption come newlines. So the language model reads images as texts from the first step of the
    second phase on, which then takes far fewer canvases.
    """

    def __init__(self, language: Language) -> None:
        self._language = language
        numbers = random.Random(0)
        known = {token for _ in range(4000) for token in self.tokens(random_scene(numbers))}
        self._known = torch.tensor(sorted(known))
        self._table = language.table[self._known].float()
        self._scale = 40 * self._table.var()

    def tokens(self, scene: Scene) -> list[int]:
        """One for each embedding of an image."""
        found = self._language.ids(scene.caption)
        newline = self._language.ids("\n")
        assert len(found) <= NUM_EMBEDS, f"too long: {scene.caption}"
        return found + newline * (NUM_EMBEDS - len(found))

    def loss(self, images: Tensor, scenes: list[Scene]) -> tuple[Tensor, Tensor]:
        """(loss, right: bool [scenes, embeds]). Cross-entropy of the distances to all words, and a little of
        the distance to the right one."""
        target = torch.searchsorted(self._known, torch.tensor([self.tokens(scene) for scene in scenes]))
        squares = images.square().sum(-1, keepdim=True) + self._table.square().sum(-1)
        distances = (squares - 2 * images @ self._table.T) / self._scale
        nearest = distances.gather(2, target[:, :, None]).mean()
        loss = functional.cross_entropy(-distances.flatten(0, 1), target.flatten()) + 0.02 * nearest
        return loss, distances.argmin(-1) == target


def learn_words(folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int) -> None:
    """The first phase: no language model but its table of embeddings.

    A second task gives more to learn from a canvas than its few words do: to draw the digits, 8 × 8 pixels
    each, as they were before they were moved, turned and coloured. What draws them is thrown away.
    """
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    eye, words = TrainedEye(), Words(Language())
    draw = nn.Linear(NUM_EMBEDS * WIDTH, 2 * 64)
    parameters = [*eye.parameters(), *draw.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    start, window = time.perf_counter(), []
    for step in range(steps):
        scenes = [random_scene(numbers) for _ in range(batch)]
        optimizer.param_groups[0]["lr"] = rate(step, steps, 1.5e-3)
        canvas, shapes = paint(scenes, material[0], numbers)
        features = eye.features(canvas)
        loss, _ = words.loss(eye.project(features), scenes)
        drawn = functional.mse_loss(draw(features.flatten(1)), shapes.flatten(1))
        optimizer.zero_grad()
        (loss + 4 * drawn).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        window.append((loss.item(), drawn.item()))
        if step % REPORT == REPORT - 1:
            mean = torch.tensor(window[-REPORT:]).mean(0)
            print(_line(step, mean[0], start), f" drawn {mean[1].item():.4f}", flush=True)
        if step % 250 == 249 or step == steps - 1:
            eye.save(folder, torch.float32)
            with torch.no_grad():
                print("held out:", *_words_known(eye, words, material[1]), sep="\n", flush=True)


def _words_known(eye: TrainedEye, words: Words, held_out: Material) -> list[str]:
    """Of canvases with one digit and with two: right words of each place of the caption."""
    numbers, found = random.Random(1), []
    for count in (1, 2):
        scenes = [random_scene(numbers, count) for _ in range(300)]
        _, right = words.loss(eye(paint(scenes, held_out, numbers).canvas), scenes)
        found.append(" ".join(f"{share:.2f}" for share in right.float().mean(0).tolist()))
    return found


def language_losses(
    eye: TrainedEye,
    language: Language,
    material: Material,
    *,
    steps: int,
    batch: int,
    peak: float = 5e-4,
    seed: int = 0,
    scene: Callable[[random.Random], Scene] = random_scene,
) -> Iterator[float]:
    """Train an eye through the frozen language model, and give the loss of every step: cross-entropy of the
    answers' tokens. scene: draws what a canvas is to show."""
    numbers = random.Random(seed)
    optimizer = torch.optim.AdamW(eye.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps, peak)
        scenes = [scene(numbers) for _ in range(batch)]
        questions = [random_question(numbers) for _ in scenes]
        answers = [one.answer(question) for one, question in zip(scenes, questions)]
        loss = language.loss(eye(paint(scenes, material, numbers).canvas), questions, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def learn_language(
    start: Path, folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int
) -> None:
    """The second phase, from the checkpoint in ``start``."""
    eye = TrainedEye().load(start)
    began, losses = time.perf_counter(), []
    for loss in language_losses(eye, Language(), material[0], steps=steps, batch=batch, seed=seed):
        losses.append(loss)
        if len(losses) % 25 == 0 or len(losses) == steps:
            mean = sum(losses[-25:]) / len(losses[-25:])
            print(_line(len(losses) - 1, torch.tensor(mean), began), flush=True)
            eye.save(folder, torch.float32)


def _line(step: int, loss: Tensor, start: float) -> str:
    return f"step {step + 1}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s"
