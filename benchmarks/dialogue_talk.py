"""What the user of `dialogue_script.py` says beside the things that he tells, and how a scripted assistant replies."""

from __future__ import annotations

import re

TALK = [
    ("I spent the morning {doing} and now I am {mood}. How is your day?",
     "It is a fine day, thank you. A morning of {doing} sounds well spent."),
    ("Do you think I should go {doing} this weekend, even if it rains?",
     "Yes, a little rain does no harm. Take a warm jacket with you."),
    ("My neighbour's {animal} kept me awake all night. What would you do?",
     "I would speak to the neighbour in a friendly way, and sleep with the window closed until then."),
    ("I feel {mood} today and I do not know why. Cheer me up a little, please.",
     "That happens to everybody. A walk, some music and a good meal often help."),
    ("A friend asked me to go {doing} with her. I have never done it. Is it hard to learn?",
     "The first steps are easy, and a patient friend is the best teacher."),
    ("I am thinking of getting a {animal}. Is that a good idea for somebody who lives in a small flat?",
     "It can be, if you have time for it every day. Ask your landlord first."),
    ("We had {dish} for dinner and everybody wanted more. What goes well with it?",
     "Fresh bread, a green salad and something cold to drink go well with {dish}."),
    ("Thanks, that helps. I was {mood} about it. Let us talk about something else.",
     "Gladly. What have you been reading lately?"),
    ("Tell me a short joke about a {animal}.",
     "Why did the {animal} bring a ladder? Because it wanted to reach the high notes."),
    ("I am {mood} because my train is late again. What can I do to pass the time?",
     "You could read a chapter of your book, or write to somebody whom you have not seen for long."),
    ("What would you name a {animal} that sleeps all day?",
     "I would name it Sunday, because it is always a day of rest."),
    ("My sister says that {doing} is a waste of time. I disagree. What do you say?",
     "Time that you enjoy is not wasted, and {doing} brings many people joy."),
]
KNOWLEDGE = [
    ("What is the capital of {country}?", "The capital of {country} is {capital}."),
    ("What language do they speak in {country}?", "Most people in {country} speak {language}."),
    ("I would like to visit {country} next year. What should I see there?", "In {country} you should see {sight}."),
    ("Can you explain {concept} in one or two sentences?", "In short, {concept} is {meaning}."),
    ("Why do people speak of {concept} so often?", "Because it concerns everybody: {concept} is {meaning}."),
    ("What does a {animal} eat?", "A {animal} eats {food}."),
    ("How long does a {animal} live?", "A {animal} lives for about {years} years."),
    ("How do I make {dish} for four people?",
     "Begin with good ingredients for four, cook the {dish} slowly, and taste it before you serve it."),
    ("What do I need for {doing}?", "For {doing} you need comfortable clothes, some patience and an hour of time."),
]
PASSAGES = [
    ("What do you think of this?\n\n{text}", "It is vividly told, and the writer watches people closely."),
    ("I read this last night:\n\n{text}\n\nWhat is it about?",
     "It is about people, what they want, and what they do to one another."),
    ("{text}\n\nDo you like how that is written?",
     "Yes, the sentences have a rhythm that one hears when reading aloud."),
    ("Please say in one sentence what happens here.\n\n{text}",
     "Somebody acts, others answer, and nothing is quite as it was before."),
]
LOGS = [
    ("Does anything look wrong here?\n\n{text}", "{finding}"),
    ("This is what the server wrote today:\n\n{text}\n\nIs it healthy?", "{finding}"),
    ("{text}\n\nWhat does that mean?", "{finding}"),
]
FINDINGS = {  # the reply to lines of a log, by what is in them
    "out of memory": "One process was ended because memory ran out; the rest is as usual.",
    "timeout": "Something answered too late at least once; the rest is as usual.",
    " 404 ": "Somebody asked for a page that is not there; the rest is as usual.",
    "": "Nothing stands out in these lines.",
}
CONFIRMING = ["Thank you. ", "Noted. ", "I see. ", "All right. "]
_ROWS = {  # what fills the templates: names of slots, and rows of what fills them together
    "doing": """swimming|painting|hiking|baking|sailing|dancing|gardening|climbing|cycling|singing|skating|sewing""",
    "mood": """tired|happy|a bit sad|curious|nervous|very hungry|proud|bored|hopeful|in a hurry""",
    "animal, food, years": """parrot, seeds and fruit, fifty|cat, meat and fish, fifteen
tortoise, leaves and grass, eighty|donkey, grass and hay, thirty|rabbit, hay and vegetables, nine
goldfish, flakes and small insects, ten|peacock, seeds and insects, twenty|lizard, insects, eight
rooster, grain and worms, seven""",
    "dish": """risotto|goulash|pea soup|paella|lasagne|apple pie|curry|moussaka|dumplings|ratatouille""",
    "country, capital, language, sight": """Peru, Lima, Spanish, Machu Picchu|Norway, Oslo, Norwegian, the fjords
Kenya, Nairobi, Swahili and English, the Masai Mara
Portugal, Lisbon, Portuguese, the old town of Porto|Vietnam, Hanoi, Vietnamese, Ha Long Bay
Canada, Ottawa, English and French, the Niagara Falls
Poland, Warsaw, Polish, the market square of Krakow|Morocco, Rabat, Arabic, the souks of Marrakesh
Chile, Santiago, Spanish, the Atacama Desert|Iceland, Reykjavik, Icelandic, the geysers
Japan, Tokyo, Japanese, the temples of Kyoto|Greece, Athens, Greek, the Acropolis""",
    "concept, meaning": """photosynthesis, how plants make sugar from light and water and air
gravity, the force that draws masses towards one another
inflation, a general rise of prices over time
electricity, the flow of charge that drives lamps and machines
evolution, how living things change over generations
plate tectonics, the slow movement of the pieces of the Earth's crust
the printing press, a machine that made books cheap and common
the water cycle, the way of water from the sea to the clouds and back""",
}
SLOTS = {names: [dict(zip(names.split(", "), row.split(", "), strict=True)) for row in re.split(r"[|\n]", rows)]
         for names, rows in _ROWS.items()}
