"""The demo's input: several users' chats over one shared system prompt.

What must not live here: sending them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Message = dict[str, str]

SYSTEM_TOKENS: Final = 1_500
"""The least that the shared system prompt has."""

_OPENING: Final = (
    "You are the front desk of the Harbour Street Library. Answer in one or two short, friendly "
    "sentences, and only from the handbook below. Where the handbook does not say, send the "
    "visitor to the desk on the ground floor.\n\nHANDBOOK\n"
)
_RULES: Final = (
    "Opening hours. The library is open from nine to eight on weekdays, from ten to six on "
    "Saturdays and from noon to five on Sundays. It is closed on public holidays.",
    "Cards. A card is free for everyone who lives, works or studies in the city. Bring an identity "
    "document and something that shows your address. A lost card is replaced for three euros.",
    "Borrowing. Books are lent for four weeks, films and games for one week, magazines for two. "
    "Up to thirty things may be borrowed at once, five of them games.",
    "Renewing. A loan is renewed twice unless somebody waits for it. Renew at the desk, by "
    "telephone or on the web page, at the latest on the day it is due.",
    "Late returns. Every late day costs twenty cents for each thing, ten euros at the most. "
    "Children under fourteen never pay for being late.",
    "Lost and damaged things. A lost book costs its price and two euros for the new label. If it "
    "is found again within six months, the price is paid back, the two euros are not. Small tears "
    "are mended free of charge; please do not use tape.",
    "Reservations. Anything that is lent out can be reserved for fifty cents. It is kept for seven "
    "days at the desk after we have written to you.",
    "Other libraries. What we do not have we order from other libraries for two euros; it takes "
    "about a week.",
    "Rooms. The quiet room needs no booking. The group rooms on the second floor hold six people "
    "and are booked for two hours at most, free of charge. The music room with its piano is booked "
    "by the hour for four euros, on weekdays and Saturdays only.",
    "Computers and printing. Every card gives two hours a day at a computer. A printed page costs "
    "ten cents in black and thirty cents in colour; scanning is free.",
    "Wireless network. The network is called Harbour and needs the number of your card.",
    "Children. The story hour is on Wednesdays at four in the round room, for children from four "
    "to eight. No booking is needed, and parents are welcome.",
    "Languages. On Tuesdays at six people who learn the language of the city meet for "
    "conversation in the reading cafe; volunteers help.",
    "Food and drink. Water in closed bottles is allowed everywhere, food only in the reading cafe.",
    "Dogs. Assistance dogs are welcome everywhere. Other dogs wait in the yard.",
    "Donations. We take books that are younger than ten years and in good order, on Fridays from "
    "ten to noon at the back door. What we do not need is sold for the children's room.",
    "Home delivery. Whoever cannot come for reasons of health is visited every second Thursday by "
    "a volunteer with a bag of books. Ask at the desk or let a friend ask.",
    "Lost property. Things that are found are kept for three months in the office behind the "
    "lockers. Lockers take a one euro coin and give it back.",
    "Photographs. Taking photographs without flash is allowed as long as nobody else is in them.",
    "Safety. If the alarm sounds, leave by the stairs, not by the lift, and meet at the fountain.",
)
_SHELF: Final = (
    "Shelf {number}. On the {floor} floor, row {row}: {subject}. Ask the desk for the key of the "
    "glass case; what is in it is read in the quiet room and not lent."
)
_SUBJECTS: Final = ("ships and harbours", "maps of the coast", "letters of the city", "old music")
_FLOORS: Final = ("ground", "first", "second")


@dataclass(frozen=True, slots=True)
class Chat:
    """One user and what they ask, turn after turn."""

    user: str
    questions: tuple[str, ...]


CHATS: Final = (
    Chat("Ada", ("I lost a book. What does that cost me?", "And if I find it again next month?")),
    Chat("Ben", ("Can I play the piano on a Sunday?", "What do three hours on a Friday cost?")),
    Chat("Chen", ("When is the story hour?", "My daughter is five. Do I have to book?")),
)


def system_prompt(count: Callable[[str], int]) -> str:
    """The shared system prompt: as much of the handbook as makes `SYSTEM_TOKENS` by `count`."""
    text = _OPENING
    number = 0
    while count(text) < SYSTEM_TOKENS:
        text += f"{number + 1}. {_entry(number)}\n"
        number += 1
    return text


def conversation(system: str, chat: Chat, answers: Sequence[str]) -> list[Message]:
    """The messages of the turn after `answers`. Pure."""
    messages = [{"role": "system", "content": system}]
    for question, answer in zip(chat.questions, answers, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": chat.questions[len(answers)]})
    return messages


def _entry(number: int) -> str:
    if number < len(_RULES):
        return _RULES[number]
    shelf = number - len(_RULES)
    return _SHELF.format(
        number=shelf + 1,
        floor=_FLOORS[shelf % len(_FLOORS)],
        row=shelf * 7 % 31 + 1,
        subject=_SUBJECTS[shelf % len(_SUBJECTS)],
    )
