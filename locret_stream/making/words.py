"""The words that made facts are of. Evaluation uses none of them (`tests/making/test_facts.py` compares)."""

from __future__ import annotations


def _phrases(lines: str) -> list[str]:
    """Phrases with "|" or the end of a line between them."""
    return [phrase.strip() for line in lines.splitlines() for phrase in line.split("|") if phrase.strip()]


FIRST = """Adrian Bettina Caspar Delphine Edwin Florence Gregor Hannah Imogen Jakob Katarina Lorenz Mireille Norbert
Ottilie Patrick Rosalind Stefan Theresa Ulrich Valerie Wendel Annika Bernhard Colette Dominic Eleanor Ferdinand Giselle
Harold Isabel Jerome Kathleen Leonard Margaret Nicholas Philippa Raymond Sabine Timothy Veronica Winston""".split()
LAST = """Abbott Brandt Carver Dawson Ellison Fletcher Granger Holloway Jansen Keller Lambert Maddox Novak Osborne
Pruitt Quigley Rasmussen Sandoval Thornton Underhill Vance Whitaker Yates Zimmer Ashford Barlow Cramer Draper Eastman
Fenwick Goddard Hartley Ingram Kendrick Langley Mercer Norwood Prescott Rowland Sinclair""".split()
TITLES = ["Mr.", "Mrs.", "Dr.", "Judge", "Inspector", "Sister", "Father", "Lieutenant"]
PLACES = """Ashby Brackwater Calder Denholm Elmsford Farrow Glenmoor Hadley Inverlake Kilburn Linfield Marston Netherby
Oakham Pembury Quarrington Redmarsh Stanmore Thornbury Uppingham Wexcombe Yarrowdale Albury Bexhill Cromer Dunstable
Evesham Frome""".split()
ROOMS = _phrases("""attic|blue drawer|back garden|old stable|kitchen cupboard|boat house|wine cellar|study|chapel loft
tool shed|green cabinet|upper gallery|north pantry|school gymnasium|hotel lobby|bakery storeroom|second floor
ticket office|fire station|mill pond""")
OBJECTS = _phrases("""oil lamp|violin case|brass telescope|sewing kit|leather satchel|rowing boat|typewriter
silver whistle|chess set|garden shears|wooden ladder|family bible|camp stove|blue umbrella|spare wheel|fishing rod
gold watch|tea set|first aid box|map of the coast|iron kettle|old camera|snow shovel|feather bed""")
OWNERS = _phrases("""the brewery|the orchard|the bakery|the ferry|the tannery|the lighthouse|the post office
the bridge|the warehouse|the printing house|the sawmill|the vineyard|the clinic|the opera house|the harbour office
the quarry|the rail depot|the weather station|the archive|the greenhouse""")
QUANTITIES = _phrases("""licence number|lease number|meter reading|inventory number|yearly rent|permit number
storage fee|insurance number|plot number|repair cost|opening balance|dial code|parcel weight|water level|tax number
ballot number|contract sum|daily output|register number|delivery number""")
ROLES = _phrases("""treasurer|caretaker|chief engineer|head gardener|night porter|conductor|accountant|choir leader
surveyor|foreman|midwife|editor|fire warden|auctioneer|cook|harbour pilot""")
EVENTS = _phrases("""spring concert|board meeting|harvest fair|boat race|chess tournament|wine tasting|school play
charity dinner|roof inspection|book sale|summer camp|city marathon|flower show|piano recital|safety drill
house auction""")
REASONS = _phrases("""the river had flooded the road|the main speaker fell ill|nobody had paid the deposit
the roof was leaking|a storm was coming in from the west|the permit arrived too late|the key had been lost
two players were injured|the price had doubled|the bridge was being repaired|the generator broke down
the tickets were printed wrongly|the mayor asked for more time|the wood was still too wet
the train drivers were on strike""")
HAPPENED = _phrases("""the market was half empty|the bells did not ring|the fountain stayed dry
the guests went home early|the parade took another street|the shelves were bare|the lamp would not burn
the parcel went back|the choir sang outside
the gate stayed shut|the visitors had to wait|the bread was sold out by noon""")
SPOTS = _phrases("""under the bridge|beside the stove|between two barrels|above the doorway|behind the curtain
on the window sill|at the foot of the bed|near the cash desk|inside a hollow tree|below the deck|under a loose tile
on top of the wardrobe|next to the weather vane|in the cart outside|at the far end of the pier""")
TASKS = _phrases("""the login page|the backup job|the search index|the payment service|the mobile app
the nightly report|the image cache|the message queue|the test cluster|the billing export|the audit log
the staging server""")
OPTIONS = _phrases("""Postgres|Redis|Kafka|SQLite|nginx|Terraform|GraphQL|RabbitMQ|Elasticsearch|protobuf|Kubernetes
Ansible|DuckDB|gRPC|Parquet|Celery""")
TASTES = {
    "tea": "jasmine|oolong|peppermint|rooibos|camomile|darjeeling", "colour": "turquoise|crimson|olive|lavender|maroon",
    "composer": "Vivaldi|Chopin|Debussy|Handel|Brahms|Schubert", "sport": "archery|fencing|rowing|badminton|hockey",
    "fruit": "apricots|quinces|mangoes|gooseberries|figs|cherries", "season": "spring|autumn|winter|summer",
    "board game": "backgammon|checkers|dominoes|mahjong|Scrabble", "cheese": "gouda|brie|cheddar|feta|camembert",
    "flower": "tulips|peonies|orchids|marigolds|lilies", "soup": "lentil soup|onion soup|tomato soup|leek soup",
}
HOURS = _phrases("""at half past six|at a quarter to nine|at noon|at 7:45 pm|at 10:20|at eleven sharp|at 16:05
at five past four|shortly before midnight|at sunrise|at 9 am|at ten to three""")
COLOURS = "turquoise beige maroon ochre teal magenta khaki mauve vermilion cyan".split()
STREETS = _phrases("""Mill Lane|Station Road|Tanner Street|Orchard Close|Quay Street|Abbey Hill|Cooper Row|Chapel Walk
Weaver Street|Long Acre|Priory Gardens|Saddler Yard""")
JOBS = _phrases("""plumber|violinist|geologist|baker|translator|pilot|carpenter|botanist|jeweller|blacksmith|vet
diver""")
ANIMALS = "mule goat canary gecko mare ferret hen hamster spaniel".split()
PETS = "Gravy Biscuit Mustard Muffin Thimble Pickle Domino Crumpet Waffles Sesame Sprocket Truffle".split()
MONTHS = "January February March April May June July August September October November December".split()
SERVICES = "billing shipping catalog session mailer scheduler uploader ledger gateway indexer".split()
VERBS = "parse merge render flush resolve encode validate refresh collect publish".split()
NOUNS = "packet batch header ledger cursor payload snapshot channel window profile".split()
FOLDERS = "core utils storage network models server tools".split()
SETTINGS = """max_retries pool_size cache_ttl batch_limit queue_depth page_size idle_timeout worker_count shard_count
flush_interval""".split()
