"""The four phases of the training. Each writes checkpoints, and may be stopped."""

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
from tutorials.eye_training.model import NUM_EMBEDS, PATCH, WIDTH, TrainedEye
from tutorials.eye_training.scenes import (
    COLOURS,
    DIGITS,
    GROUNDS,
    PLAIN,
    Scene,
    random_question,
    random_scene,
)

REPORT = 50
"""Steps of the first two phases between two lines."""
EASY = 0.15
"""The share of the first phase's steps in which all canvases have one digit on a plain ground."""


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate: up in the first twentieth, then down by a cosine."""
    warm = max(1, steps // 20)
    return peak * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


@torch.no_grad()
def whiten_patches(eye: TrainedEye, canvases: Tensor) -> None:
    """Start from patches whose principal components are about equally large.

    Of a patch's variance nearly all is its mean colour, so an eye that starts from random weights learns
    colours, and for a long time no shapes.
    """
    embeddings = next(module for module in eye.modules() if hasattr(module, "patch_embedding"))
    patches = functional.unfold(canvases.float() / 127.5 - 1, PATCH, stride=PATCH)
    flat = patches.transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(torch.cov(flat.T))
    scale = (values + values[-32]).rsqrt()
    weight = (vectors * scale)[:, -WIDTH:].T
    embeddings.patch_embedding.weight.copy_(weight.view_as(embeddings.patch_embedding.weight))
    embeddings.patch_embedding.bias.copy_(-weight @ flat.mean(0))
    embeddings.position_embedding.weight.normal_(0, 0.5)


class Attributes(nn.Module):
    """Reads the facts of a scene from all embeddings of the encoder; thrown away after the first phase."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes = [len(DIGITS)] * 2 + [len(COLOURS)] * 2 + [4, len(GROUNDS)]
        self._read = nn.Linear(NUM_EMBEDS * WIDTH, sum(self._sizes))

    def loss(self, features: Tensor, scenes: list[Scene]) -> tuple[Tensor, list[Tensor]]:
        """(loss, right): cross-entropy, and for both digits, both colours, the layout and the ground which
        scenes are read rightly, those left out that have none."""
        logits = self._read(features.flatten(1)).split(self._sizes, dim=1)
        loss, right = features.new_zeros(()), []
        for number, part in enumerate(logits):
            target = torch.tensor([self._facts(scene)[number] for scene in scenes])
            total = functional.cross_entropy(part, target, ignore_index=-1, reduction="sum")
            loss = loss + total / max(1, int((target >= 0).sum()))
            right.append((part.argmax(1) == target)[target >= 0])
        return loss, right

    @staticmethod
    def _facts(scene: Scene) -> tuple[int, ...]:
        """-1: the scene has none."""
        digits = [digit for digit, _ in scene.digits] + [-1, -1]
        colours = [list(COLOURS).index(colour) for _, colour in scene.digits] + [-1, -1]
        layout = len(scene.digits) + scene.is_stacked
        return *digits[:2], *colours[:2], layout, list(GROUNDS).index(scene.ground)


def learn_attributes(
    folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int
) -> None:
    """The first phase: the encoder alone, which learns what is on a canvas."""
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    eye, attributes = TrainedEye(), Attributes()
    some = [random_scene(numbers) for _ in range(2000)]
    whiten_patches(eye, paint(some, material[0], numbers))
    parameters = [*eye.parts["vision_tower"].parameters(), *attributes.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    start = time.perf_counter()
    for step in range(steps):
        is_easy = step < EASY * steps
        scenes = [
            random_scene(numbers, 1, numbers.choice(list(PLAIN))) if is_easy else random_scene(numbers)
            for _ in range(batch)
        ]
        optimizer.param_groups[0]["lr"] = rate(step, steps, 1e-3)
        loss, _ = attributes.loss(eye.features(paint(scenes, material[0], numbers)), scenes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % REPORT == REPORT - 1:
            print(_line(step, loss, start), flush=True)
        if step % 200 == 199 or step == steps - 1:
            eye.save(folder, torch.float32)
            held_out = random.Random(1)
            scenes = [random_scene(held_out) for _ in range(400)]
            with torch.no_grad():
                _, right = attributes.loss(eye.features(paint(scenes, material[1], held_out)), scenes)
            print("held out:", *(f"{found.float().mean().item():.3f}" for found in right), flush=True)


class Words:
    """The second phase's targets: an image's embeddings are to be those of its caption's tokens, in order.

    After the caption come newlines. So the language model reads images as texts from the first step of the
    third phase on, which then takes far fewer canvases.
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


def learn_words(
    start: Path,
    folder: Path,
    material: tuple[Material, Material],
    steps: int,
    batch: int,
    seed: int,
    peak: float = 1e-3,
    keeps_facts: bool = True,
) -> None:
    """The second phase and the fourth, from the checkpoint in ``start``: no language model but its table of
    embeddings.

    keeps_facts: the encoder goes on learning facts as well: of a caption's words, few tell one digit from
    another. The fourth phase learns words alone, with small steps; of it, the encoder is kept.
    """
    torch.manual_seed(seed)
    numbers = random.Random(seed + 1)
    eye, attributes, words = TrainedEye().load(start), Attributes(), Words(Language())
    parameters = [*eye.parameters(), *attributes.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    began = time.perf_counter()
    for step in range(steps):
        scenes = [random_scene(numbers) for _ in range(batch)]
        optimizer.param_groups[0]["lr"] = rate(step, steps, peak)
        features = eye.features(paint(scenes, material[0], numbers))
        loss, _ = words.loss(eye.project(features), scenes)
        if keeps_facts:
            loss = attributes.loss(features, scenes)[0] + 4 * loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % REPORT == REPORT - 1:
            print(_line(step, loss, began), flush=True)
        if step % 200 == 199 or step == steps - 1:
            eye.save(folder, torch.float32)
            with torch.no_grad():
                print("held out:", *_words_known(eye, words, material[1]), sep="\n", flush=True)


def _words_known(eye: TrainedEye, words: Words, held_out: Material) -> list[str]:
    """Of canvases with one digit and with two: right words of each place of the caption."""
    numbers, found = random.Random(1), []
    for count in (1, 2):
        scenes = [random_scene(numbers, count) for _ in range(300)]
        _, right = words.loss(eye(paint(scenes, held_out, numbers)), scenes)
        found.append(" ".join(f"{share:.2f}" for share in right.float().mean(0).tolist()))
    return found


def language_losses(
    eye: TrainedEye,
    language: Language,
    material: Material,
    *,
    steps: int,
    batch: int,
    peak: float = 3e-4,
    seed: int = 0,
    scene: Callable[[random.Random], Scene] = random_scene,
) -> Iterator[float]:
    """Train an eye through the frozen language model, and give the loss of every step: cross-entropy of the
    answers' tokens. scene: draws what a canvas is to show.

    A little of the second phase's loss goes on, so that the eye goes on saying words.
    """
    numbers, words = random.Random(seed + 2), Words(language)
    optimizer = torch.optim.AdamW(eye.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps, peak)
        scenes = [scene(numbers) for _ in range(batch)]
        questions = [random_question(numbers) for _ in scenes]
        answers = [one.answer(question) for one, question in zip(scenes, questions)]
        images = eye(paint(scenes, material, numbers))
        loss = language.loss(images, questions, answers)
        optimizer.zero_grad()
        (loss + 0.5 * words.loss(images, scenes)[0]).backward()
        torch.nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def learn_language(
    start: Path, folder: Path, material: tuple[Material, Material], steps: int, batch: int, seed: int
) -> None:
    """The third phase, from the checkpoint in ``start``."""
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
