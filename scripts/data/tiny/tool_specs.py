"""The tools of the tool-call dialogues: what they take, how people ask for them, what they give back.

A parameter is (schema, kind of value); kinds are drawn in `tools.py`. A phrase holds its parameters in braces; a
parameter that no phrase must hold is optional. Results and their answers hold parameters and result fields.
"""

# ruff: noqa: E501, SIM905 (tables, one entry a line)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
STRINGS, INTEGERS = {"type": "array", "items": STRING}, {"type": "array", "items": INTEGER}


def choice(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


@dataclass(frozen=True)
class Spec:
    """One tool. `result`: field -> kind of value; `says`: the answer after the result."""

    name: str
    description: str
    takes: dict[str, tuple[dict[str, Any], str]]
    phrases: tuple[str, ...]
    result: dict[str, str] = field(default_factory=dict)
    says: str = "Done."


UNITS = choice("celsius", "fahrenheit")
SPECS: tuple[Spec, ...] = (
    Spec("get_weather", "Get the weather of a city.", {"city": (STRING, "city"), "unit": (UNITS, "unit")},
         ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city} please.", "What is the weather like in {city}?", "Is it warm in {city}?", "What is the weather in {city} in {unit}?", "Tell me the weather of {city} in {unit}."),
         {"temperature": "temperature", "sky": "sky"}, "It is {temperature} degrees and {sky} in {city}."),
    Spec("send_email", "Send an email.", {"to": (STRING, "email"), "subject": (STRING, "phrase")},
         ("Send an email to {to} about {subject}.", "Write to {to} with the subject {subject}.", "Email {to}: {subject}.", "Please mail {to} about {subject}.")),
    Spec("set_timer", "Start a timer.", {"minutes": (INTEGER, "minutes"), "label": (STRING, "noun")},
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Timer for {minutes} minutes please.", "Set a {minutes} minute timer for {label}.", "Set a timer called {label} for {minutes} minutes."),
         {}, "The timer runs for {minutes} minutes."),
    Spec("set_alarm", "Set an alarm.", {"time": (STRING, "time")},
         ("Wake me at {time}.", "Set an alarm for {time}.", "I need an alarm at {time}.", "Please wake me up at {time}."), {}, "The alarm is set for {time}."),
    Spec("add", "Add two numbers.", {"a": (NUMBER, "number"), "b": (NUMBER, "number")},
         ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool.", "Call add on {a} and {b}.", "Let the tool compute {a} plus {b}.")),
    Spec("multiply", "Multiply two numbers.", {"a": (NUMBER, "number"), "b": (NUMBER, "number")},
         ("Use the tool to multiply {a} by {b}.", "Multiply {a} and {b} with the tool.", "Call multiply on {a} and {b}.")),
    Spec("search_web", "Search the web.", {"query": (STRING, "phrase"), "limit": (INTEGER, "small")},
         ("Search the web for {query}.", "Look up {query}.", "Find {query} on the web.", "Search for {query}.", "Search for {query} and show {limit} results.", "Find {limit} pages about {query}."),
         {"found": "small"}, "I found {found} pages about {query}."),
    Spec("book_flight", "Book a flight.", {"from_city": (STRING, "city"), "to_city": (STRING, "city"), "date": (STRING, "date")},
         ("Book a flight from {from_city} to {to_city} on {date}.", "I want to fly from {from_city} to {to_city} on {date}.", "Fly me from {from_city} to {to_city}, {date}.", "On {date} I need a flight from {from_city} to {to_city}."),
         {"flight": "code"}, "Flight {flight} from {from_city} to {to_city} is booked."),
    Spec("book_table", "Reserve a table.", {"name": (STRING, "person"), "people": (INTEGER, "small"), "time": (STRING, "time")},
         ("Book a table for {people} people at {time}, name {name}.", "Reserve a table for {people} at {time} for {name}.", "I am {name}, I need a table for {people} at {time}."), {}, "A table for {people} is booked at {time}."),
    Spec("create_event", "Put an event into the calendar.", {"title": (STRING, "phrase"), "date": (STRING, "date"), "all_day": (BOOLEAN, "flag")},
         ("Put {title} into my calendar on {date}.", "Create an event {title} on {date}.", "Add {title} on {date} to the calendar.", "Create an event {title} on {date}, all day: {all_day}."), {}, "{title} is in your calendar on {date}."),
    Spec("turn_light", "Switch a light.", {"room": (STRING, "room"), "on": (BOOLEAN, "switch")},
         ("Turn {on} the light in the {room}.", "Turn the {room} light {on}.", "Switch {on} the {room} light.", "Light {on} in the {room} please."), {}, "The light in the {room} is switched {on}."),
    Spec("set_temperature", "Set the heating.", {"room": (STRING, "room"), "degrees": (NUMBER, "degrees")},
         ("Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.", "Make the {room} {degrees} degrees warm.", "I want {degrees} degrees in the {room}."), {}, "The {room} is set to {degrees} degrees."),
    Spec("play_music", "Play music.", {"artist": (STRING, "last"), "shuffle": (BOOLEAN, "flag")},
         ("Play music by {artist}.", "Play {artist}.", "I want to hear {artist}.", "Put on some {artist}.", "Play {artist} with shuffle {shuffle}."), {}, "Playing {artist}."),
    Spec("get_stock", "Get the price of a stock.", {"symbol": (STRING, "symbol")},
         ("What is the price of {symbol}?", "How is the {symbol} stock?", "Get the stock {symbol}.", "Stock price of {symbol}?"), {"price": "price"}, "{symbol} is at {price}."),
    Spec("convert_money", "Convert an amount.", {"amount": (NUMBER, "number"), "source": (STRING, "currency"), "target": (STRING, "currency")},
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?", "Change {amount} {source} into {target}."), {"result": "price"}, "{amount} {source} is {result} {target}."),
    Spec("translate", "Translate a text.", {"text": (STRING, "phrase"), "language": (STRING, "language")},
         ("Translate {text} into {language}.", "How do you say {text} in {language}?", "Say {text} in {language}.", "I need {text} in {language}.")),
    Spec("create_user", "Create a user account.", {"name": (STRING, "person"), "age": (INTEGER, "age"), "admin": (BOOLEAN, "flag")},
         ("Create a user {name}, age {age}.", "Add the user {name}, {age} years old.", "Make an account for {name} who is {age}.", "Create the user {name}, age {age}, admin {admin}."), {"id": "count"}, "The user {name} has the id {id}."),
    Spec("delete_file", "Delete a file.", {"path": (STRING, "file")},
         ("Delete the file {path}.", "Remove {path}.", "Please delete {path}.", "Get rid of {path}."), {}, "{path} is deleted."),
    Spec("read_file", "Read a file.", {"path": (STRING, "file"), "lines": (INTEGER, "small")},
         ("Read the file {path}.", "Show me {path}.", "What is in {path}?", "Open {path}.", "Show the first {lines} lines of {path}.", "Read {lines} lines of {path}.")),
    Spec("order_item", "Order an article.", {"item": (STRING, "noun"), "count": (INTEGER, "count")},
         ("Order {count} pieces of {item}.", "Buy {count} times {item}.", "I need {count} of {item}.", "Order the article {item}, {count} pieces."), {"price": "price"}, "{count} of {item} cost {price}."),
    Spec("find_route", "Find a way between two places.", {"start": (STRING, "city"), "end": (STRING, "city"), "mode": (choice("car", "train", "bike"), "mode")},
         ("How do I get from {start} to {end}?", "Find a route from {start} to {end}.", "Show the way from {start} to {end}.", "Find a route from {start} to {end} by {mode}.", "How do I get from {start} to {end} by {mode}?"), {"hours": "small"}, "From {start} to {end} it takes {hours} hours."),
    Spec("add_tags", "Put tags on a note.", {"note": (INTEGER, "count"), "tags": (STRINGS, "words")},
         ("Add the tags {tags} to note {note}.", "Tag note {note} with {tags}.", "Put {tags} on note {note}."), {}, "Note {note} has its tags."),
    Spec("mean", "Mean of some whole numbers.", {"values": (INTEGERS, "integers")},
         ("What is the mean of {values}?", "Give me the mean of {values}.", "Compute the mean of {values} with the tool.", "Average of {values}?"), {"mean": "number"}, "The mean is {mean}."),
    Spec("call_person", "Call somebody.", {"name": (STRING, "person"), "video": (BOOLEAN, "flag")},
         ("Call {name}.", "Please call {name}.", "I want to talk to {name}.", "Ring {name}.", "Call {name}, video {video}."), {}, "Calling {name}."),
    Spec("send_message", "Send a short message.", {"name": (STRING, "first"), "text": (STRING, "phrase")},
         ("Tell {name}: {text}.", "Send {name} the message {text}.", "Message {name} that {text}.", "Write {text} to {name}."), {}, "The message to {name} is sent."),
    Spec("get_capital", "Get the capital of a country.", {"country": (STRING, "country")},
         ("What is the capital of {country}?", "Capital of {country}?", "Look up the capital of {country}."), {"capital": "city"}, "The capital of {country} is {capital}."),
    Spec("track_parcel", "Find a parcel.", {"code": (STRING, "code")},
         ("Where is my parcel {code}?", "Track {code}.", "Find the parcel {code}.", "What is the state of parcel {code}?"), {"place": "city"}, "The parcel {code} is in {place}."),
)  # fmt: skip

# Tools made up on the spot are a verb, a noun and some of these parameters: the model must read what is declared.
VERBS = (
    "get set add remove open close start stop check update list count find show send load save move copy print".split()
)
NOUNS = "lamp door report order room ticket page task card box table cup garden game photo song note invoice robot pump".split()
PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "level": (INTEGER, "small"), "name": (STRING, "first"), "city": (STRING, "city"), "title": (STRING, "phrase"),
    "amount": (NUMBER, "number"), "code": (STRING, "code"), "color": (STRING, "colour"), "is_final": (BOOLEAN, "flag"),
    "day": (STRING, "day"), "count": (INTEGER, "count"), "words": (STRINGS, "words"), "values": (INTEGERS, "integers"),
    "path": (STRING, "file"), "owner": (STRING, "person"), "speed": (NUMBER, "number"), "force": (BOOLEAN, "flag"),
    "topic": (STRING, "noun"), "size": (choice("small", "medium", "large"), "size"), "date": (STRING, "date"),
    "time": (STRING, "time"), "email": (STRING, "email"), "year": (INTEGER, "year"),
}  # fmt: skip
