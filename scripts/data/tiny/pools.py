"""Words that are put into templates: people, places, things; each pool split into a part to train on and one held out.

In: lists written here, and WordNet's names. Out: Pools, from which families draw by split.
"""

# ruff: noqa: E501, SIM905 (tables, one entry a line)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from scripts.data.tiny.exchange import Split, is_held_out
from scripts.data.tiny.wordnet import WordNet

SHARE = 0.15  # of each pool is held out
# How often a training draw is a word of no pool: else a name that was never seen in its place is not copied from the
# text but replaced by one that was (colours: "grey" became "golden", measured on held-out tool calls).
STRANGE = 0.4
ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl qu sh sk st th tr".split()
VOWELS = "a e i o u ai ea ee io ou".split()
CODAS = ["", "", "", *"n r s t l m k x nd rt sh ck ll".split()]
PROPER = {"first", "last", "city", "country", "day", "month"}
FIRST_NAMES = """
Ada Adam Aisha Akira Alan Alba Alice Amara Amir Ana Andrea Anna Anton Aria Arjun Astrid Ben Bianca Boris Bruno Carla Carlos
Cecilia Chen Chloe Clara Cora Dana Daniel David Diego Dina Dmitri Ed Elena Eli Elsa Emil Emma Erik Eva Fatima Felix Fiona
Flora Frank Freya Gabriel Gina Grace Greta Hana Hassan Heidi Helen Henry Hugo Ida Igor Ines Ingrid Irene Isaac Ivan Ivy Jack
Jane Jasmin Jon Jonas Josef Julia Kai Kamal Karin Karl Kate Kenji Kim Lara Lars Laura Leila Leo Lily Lina Lisa Luca Lucia
Luis Lukas Maja Marco Maria Marta Max Maya Mei Mia Milan Mina Mira Nadia Naomi Nia Nick Nina Noah Nora Olga Olivia Omar
Oscar Otto Pablo Paula Pedro Petra Priya Quinn Rachel Raj Ravi Rita Rob Rosa Ruth Sam Sana Sara Sasha Selma Simon Sofia
Sven Tara Tariq Tim Tina Tom Uma Ursula Vera Victor Wanda Wei Will Yara Yuki Yusuf Zara Zoe Mary John Peter Paul Susan Linda
""".split()
THINGS = """
apples pears books coins marbles stamps shells pencils cards stickers eggs cookies oranges plums tickets toys stones nuts
buttons flowers balls cups plates bottles candles keys lemons peaches melons carrots potatoes onions chairs boxes bags hats
shirts socks photos letters maps pens notebooks bricks beads feathers leaves tomatoes cakes muffins sandwiches badges
""".split()
JOBS = """
baker teacher nurse doctor pilot farmer painter plumber lawyer singer writer cook gardener driver engineer carpenter dentist
librarian mechanic musician photographer tailor translator waiter actor architect barber butcher chemist fisherman
""".split()
COLOURS = "red blue green yellow black white brown orange purple pink grey silver golden".split()
ANIMALS = """
cat dog horse rabbit parrot goat hamster pony turtle canary goldfish sheep duck cow donkey mouse snake lizard chicken
""".split()
HOBBIES = """
chess tennis swimming dancing painting cooking hiking cycling singing reading football skating sailing knitting fishing
running climbing drawing gardening photography basketball skiing surfing poetry
""".split()
FOODS = """
pizza soup rice pasta salad bread cheese fish curry noodles cake pancakes dumplings beans tacos sushi porridge stew
""".split()
COUNTRIES = "France Spain Italy Norway Kenya Chile Japan India Poland Egypt Brazil Canada".split()
ROOMS = "kitchen bedroom bathroom garage office garden hall cellar attic library balcony studio lounge".split()
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_PEOPLE = ["writer", "composer", "painter", "physicist", "chemist", "mathematician", "philosopher", "poet", "actor"]
_PLACES = ["city", "national capital", "port", "town", "state capital", "provincial capital"]


@dataclass(frozen=True)
class Pools:
    """Names by kind; draw through `pick`, which keeps the split."""

    lists: dict[str, Sequence[str]]
    parts: dict[tuple[str, Split], Sequence[str]]

    @staticmethod
    def of(lists: dict[str, Sequence[str]]) -> Pools:
        """Split every list; a short one keeps at least its last entry out."""
        parts: dict[tuple[str, Split], Sequence[str]] = {}
        for kind, words in lists.items():
            out = {w for w in words if is_held_out(f"pool {kind}", w, SHARE)} or {words[-1]}
            parts[kind, "train"] = [w for w in words if w not in out]
            parts[kind, "eval"] = [w for w in words if w in out]
        return Pools(lists, parts)

    def pick(self, rng: Random, kind: str, split: Split) -> str:
        """One of the part of the list that belongs to `split`; in training at times a strange word instead."""
        if split == "train" and rng.random() < STRANGE:
            return self._strange(rng, kind)
        return rng.choice(self.parts[kind, split])

    def _strange(self, rng: Random, kind: str) -> str:
        """A made-up word, or a word of another kind, written as this kind is; never one that is held out here."""
        words = self.lists.get("word", ())
        while True:
            found = rng.choice(words) if words and rng.random() < 0.3 else made_up_word(rng)
            found = found.capitalize() if kind in PROPER else found
            if " " not in found and found not in self.parts[kind, "eval"]:
                return found


def made_up_word(rng: Random) -> str:
    """One to three syllables."""
    count = rng.choices((1, 2, 3), (2, 5, 2))[0]
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))


def load(net: WordNet) -> Pools:
    """The lists above, names of WordNet, and its common words."""
    fixed = {
        "first": FIRST_NAMES, "thing": THINGS, "job": JOBS, "colour": COLOURS, "animal": ANIMALS, "hobby": HOBBIES,
        "food": FOODS, "room": ROOMS, "day": DAYS, "month": MONTHS,
    }  # fmt: skip
    found: dict[str, Sequence[str]] = dict(fixed)
    found["city"] = net.instances(_PLACES)
    found["country"] = [*net.instances(["country"]), *COUNTRIES]
    found["last"] = [n for n in net.instances(_PEOPLE) if " " not in n]
    found["noun"] = [s.words[0] for s in net.common("n", 10) if s.count >= 2]
    found["verb"] = [s.words[0] for s in net.common("v", 10) if s.count >= 2]
    found["adjective"] = [s.words[0] for s in net.common("a", 10) if s.count >= 2]
    found["word"] = [s.words[0] for part in "nva" for s in net.common(part, 12)]
    return Pools.of(found)
