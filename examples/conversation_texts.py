"""What the users of `serve_conversations.py` say, under which system prompts, and when.

Everything is drawn with `random.Random` from the sentences below: a seed gives the same text everywhere.
"""

from dataclasses import dataclass
from random import Random

SYSTEM_PROMPTS = (
    "You are the night librarian of a small harbour town. Readers write to you when the desk is closed. "
    "Answer briefly and warmly, name a book when one comes to mind, and say plainly when you do not know. "
    "The library has three rooms: the reading room, the map room, and the cellar with the old newspapers. "
    "Loans run for four weeks; nobody pays a fine who brings back a book dry. Never give away what another "
    "reader has borrowed. If somebody asks for legal or medical advice, send them to a person who gives it.",
    "You help the members of a community garden. The garden has forty beds, two rain barrels, a compost heap "
    "and one wheelbarrow that everybody wants on Saturdays. Give one piece of advice at a time. Ask about "
    "soil and light before you recommend a plant. The winters are wet and mild, the last frost comes in the "
    "middle of April. We do not use poison, and we do not argue about slugs.",
    "You are the assistant of a repair workshop for bicycles. Describe the fault back to the customer in one "
    "sentence, then list what to check, cheapest first. Mention the tool that each check needs. If brakes, "
    "fork or frame may be damaged, say so first and tell the customer not to ride. Prices are given only for "
    "parts, never for work. The workshop is open from Tuesday to Saturday; in March it is always full, and a "
    "customer who leaves the bicycle overnight gets it back in the order in which the bicycles came in.",
    "You tutor adults who learn to read sheet music. Assume no earlier lessons. Use everyday words first and "
    "the musical term after it, once. Every answer ends with a small exercise of at most four bars. Praise "
    "what is right before you correct what is wrong.",
)  # fmt: skip

OPENINGS = (
    "Good evening! Is somebody there at this hour?",
    "Hello, I am new here. Where should I begin?",
    "A friend sent me to you. Can you help me with a small question?",
    "Could you explain to me how this works?",
    "I tried it on my own yesterday and it went wrong.",
    "What would you recommend to a complete beginner?",
)

TOPICS = (
    "the old map of the harbour", "tomatoes under a glass roof", "a squeaking rear brake", "the bass clef",
    "letters from the lighthouse keeper", "beans that climb a string", "a chain that jumps under load",
    "a waltz in three quarters", "newspapers from the year of the flood", "compost that smells of vinegar",
    "a wheel that is no longer round", "the dot behind a note", "stories about the winter sea",
    "roses in a shady corner", "gears that change by themselves", "the difference between sharp and flat",
    "a cookbook without any meat", "mint that takes over the whole bed", "a light that fails in the rain",
    "rests at the beginning of a bar", "the history of the ferry", "apples that fall too early",
    "a saddle that slowly sinks", "singing in two voices",
)  # fmt: skip

FOLLOW_UPS = (
    "Please tell me more about {}.",
    "And what about {}? I have wondered for years.",
    "My neighbour insists that {} is the real problem. Is that so?",
    "How long does it take to get used to {}?",
    "I have read two opinions on {}, and they contradict each other. Which one would you trust, and why?",
    "Thanks. If I had only ten minutes a day for {}, what should I do with them?",
    "Is {} something that I can manage alone, or do I need a second pair of hands?",
    "Let us leave that for now. What do people usually get wrong about {}?",
    "You mentioned it before, but I did not follow. What has that to do with {}?",
    "Could you sum up in three short lines what you said, and add a word on {}?",
)


@dataclass(frozen=True)
class Turn:
    """What a user says, and how the answer is sampled; `temperature` None is greedy.

    `think_steps`: engine steps between the answer before (or the start of the conversation) and this turn.
    """

    text: str
    answer_tokens: int
    temperature: float | None
    seed: int
    think_steps: int


@dataclass(frozen=True)
class Conversation:
    """A system prompt, the engine step at which the user arrives, and what the user will say."""

    system_prompt: str
    start_step: int
    turns: tuple[Turn, ...]


def conversations(count: int, turns: int, seed: int = 0) -> list[Conversation]:
    """Users who arrive one after the other; the same arguments give the same conversations."""
    rng = Random(seed)
    return [
        Conversation(
            system_prompt=rng.choice(SYSTEM_PROMPTS),
            start_step=60 * index + rng.randrange(30),
            turns=tuple(_turn(number, rng) for number in range(turns)),
        )
        for index in range(count)
    ]


def _turn(number: int, rng: Random) -> Turn:
    asks = rng.choice(FOLLOW_UPS).format(rng.choice(TOPICS))
    return Turn(
        text=rng.choice(OPENINGS) if number == 0 else asks,
        answer_tokens=rng.randrange(20, 61),
        temperature=rng.choice((None, 0.7, 1.0)),
        seed=rng.randrange(1 << 31),
        think_steps=0 if number == 0 else rng.randrange(10, 90),
    )


if __name__ == "__main__":
    print(__doc__)
