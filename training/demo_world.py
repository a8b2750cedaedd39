"""The closed little world the demo models live in: every word and fact that training may use.

The lists are short on purpose.  A model of one to eight million parameters trained for two hours
must see each word thousands of times, and a vocabulary of 1,024 tokens must hold most of them
whole.
"""

from __future__ import annotations


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = split_words(
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Nina Oscar Paul Rosa Sam "
    "Tina Uma Victor Wendy Yara Zoe Adam Bella Chris Diana Erik Fiona George Helen Ivan Julia Karl "
    "Laura Max Nora Otto Petra Quinn Ralf Sara Tom Ursula Vera Will Lucy"
)
OBJECTS = split_words(
    "lamp key book clock chair box cup coin map ring pen hat coat bag ball kite drum flute mirror "
    "ladder hammer rope candle basket"
)
PLACES = split_words(
    "kitchen garden attic cellar garage library office tower barn hall school station harbour "
    "museum park forest"
)
COLOURS = split_words("red blue green yellow black white brown orange purple pink grey gold")
FRUITS_AND_ANIMALS = split_words(
    "apple pear plum lemon cherry melon grape peach cat dog horse cow sheep goat duck mouse lion "
    "tiger bear wolf fox rabbit snake whale"
)
LIST_WORDS = FRUITS_AND_ANIMALS + OBJECTS
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words(
    "January February March April May June July August September October November December"
)
NUMBER_WORDS = split_words("zero one two three four five six seven eight nine ten eleven twelve")
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
}
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "young"),
    ("day", "night"),
    ("up", "down"),
    ("left", "right"),
    ("open", "closed"),
    ("happy", "sad"),
    ("hard", "soft"),
    ("high", "low"),
    ("light", "dark"),
    ("rich", "poor"),
    ("full", "empty"),
    ("early", "late"),
    ("wet", "dry"),
)
THING_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "blood": "red",
    "chocolate": "brown",
    "a carrot": "orange",
    "an elephant": "grey",
    "a flamingo": "pink",
}
ANIMAL_SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "lion": "roar",
    "mouse": "squeak",
    "snake": "hiss",
}
FILLER_SUBJECTS = (
    "The weather",
    "The market",
    "The old road",
    "A quiet river",
    "The evening train",
    "The new bridge",
    "A small boat",
    "The village",
    "The morning paper",
    "A warm wind",
)
FILLER_VERBS = (
    "was calm",
    "came late",
    "looked bright",
    "stayed open",
    "seemed slow",
    "was busy",
    "felt cold",
    "turned north",
)
FILLER_ENDINGS = (
    "",
    " all day",
    " that week",
    " near the sea",
    " after the rain",
    " as usual",
    " for a while",
    " before dinner",
)
