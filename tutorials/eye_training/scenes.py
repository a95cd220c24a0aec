"""Scenes: what a canvas shows, and what is said about it. About 60 words altogether."""

from __future__ import annotations

import random
from dataclasses import dataclass

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (215, 30, 30),
    "green": (30, 170, 50),
    "blue": (45, 80, 230),
    "yellow": (240, 215, 40),
    "pink": (240, 100, 200),
    "white": (245, 245, 245),
}
"""RGB."""
PLAIN = {"black": (12, 12, 12), "grey": (120, 120, 120), "white": (235, 235, 235)}
PHOTOS = {
    "flower": "a photo of a flower",
    "temple": "a photo of a temple",
    "cat": "a photo of a cat",
    "coffee": "a photo of coffee",
    "rocket": "a photo of a rocket",
    "stars": "a photo of stars",
    "bricks": "a photo of bricks",
    "grass": "a photo of grass",
}
GROUNDS = {**{name: f"a {name} canvas" for name in PLAIN}, **PHOTOS}

WHAT = ("What do you see?", "What is in the picture?", "Describe the picture.", "What is this?")
"""Questions about all of it."""
WHICH_DIGIT = "Which digit is it?"
WHICH_COLOUR = "Which colour is it?"
WHICH_GROUND = "What is in the background?"


@dataclass(frozen=True)
class Scene:
    """ground: a key of GROUNDS. digits: up to two of (digit, colour), the left or the upper one first.
    is_stacked: the second digit is below the first, not beside it."""

    ground: str
    digits: tuple[tuple[int, str], ...] = ()
    is_stacked: bool = False

    @property
    def caption(self) -> str:
        """One of eight sentences, by the number and the order of the digits and the kind of the ground."""
        ground = GROUNDS[self.ground]
        if not self.digits:
            ground = ground.replace("a ", "an empty ", 1) if self.ground in PLAIN else ground
            return f"{ground[0].upper()}{ground[1:]}."
        named = [f"a {colour} {DIGITS[digit]}" for digit, colour in self.digits]
        text = f"{(' above ' if self.is_stacked else ' left of ').join(named)} on {ground}."
        return "A" + text[1:]

    def answer(self, question: str) -> str:
        """What is right, to one of the questions above."""
        if question in WHAT:
            return self.caption
        if question == WHICH_GROUND:
            ground = GROUNDS[self.ground]
            return f"{ground[0].upper()}{ground[1:]}."
        if not self.digits:
            return "There is no digit."
        if question == WHICH_COLOUR:
            return " and ".join(colour for _, colour in self.digits).capitalize() + "."
        named = [("an " if digit == 8 else "a ") + DIGITS[digit] for digit, _ in self.digits]
        return " and ".join(named).capitalize() + "."


def random_scene(random: random.Random, num_digits: int | None = None, ground: str | None = None) -> Scene:
    """A scene: without digits, with one or with two, as 1 to 4 to 5; a plain ground as 2 to 3."""
    if ground is None:
        ground = random.choice(list(PLAIN if random.random() < 0.4 else PHOTOS))
    if num_digits is None:
        num_digits = random.choices((0, 1, 2), (1, 4, 5))[0]
    colours = [colour for colour in COLOURS if not colour == ground == "white"]
    digits = tuple((random.randrange(10), random.choice(colours)) for _ in range(num_digits))
    return Scene(ground, digits, is_stacked=len(digits) == 2 and random.random() < 0.5)


def random_question(random: random.Random) -> str:
    """Every second one asks for all of it."""
    return random.choice((*WHAT, WHICH_DIGIT, WHICH_COLOUR, WHICH_GROUND, random.choice(WHAT)))
