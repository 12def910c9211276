"""The words that facts are made of, and which of them are held out of training."""

import zlib


def is_held_out(word: str, one_in: int = 4) -> bool:
    """Whether `word` belongs to the held-out part: one in `one_in`, by a hash that never changes."""
    return zlib.crc32(word.lower().encode()) % one_in == 0


NOUNS = """
acorn almond amber anchor anvil apple apricot archer arrow ash aspen aster atlas aurora badger bamboo banner
barley basil basin beacon beaver bell birch bishop bison blossom bobcat boulder bramble brass breeze bridge
bronze brook buckle buffalo bugle butter cabin cactus camel candle canoe canyon carbon cargo carpet castle cedar
chalk cherry chestnut chimney cinder citron cliff clover cobalt cobra comet compass condor copper coral cotton
cougar coyote cradle crane crater cricket crimson crow crown crystal cypress dagger daisy dolphin donkey dragon
drum dune eagle echo elbow elder elk elm ember emerald engine falcon feather fennel fern ferry fiddle finch
flint flute forest fossil fountain fox galaxy garden garnet gazelle ginger glacier glider goose gopher granite
grape gravel grove gull hammer hamlet harbor harp harvest hawk hazel heather hedge helmet heron hickory hornet
horizon hunter indigo iris island ivory ivy jackal jaguar jasmine jasper javelin juniper kayak kernel kestrel
kettle kitten koala ladder lagoon lantern larch lark laurel lavender lemon leopard lichen lilac lily linden
lion lizard llama lobster locust lotus lumber lynx magnet magpie mallard mango mantis maple marble marigold
marlin marsh meadow melon mercury meteor mill mint mirror monarch moose moss mountain mulberry mustang myrtle
nectar needle nettle nickel nutmeg oak oasis oboe ocean olive onyx opal orange orbit orchard orchid oriole osprey
otter owl oyster paddle palm panda panther paper parrot peach pearl pebble pelican pepper petal phoenix piano
pigeon pillar pine pioneer piper planet plum pollen pony poplar poppy prairie prism puffin puma pumpkin quail
quarry quartz quill rabbit raccoon radar radish raven reef ribbon ridge river robin rocket rose rowan ruby
saddle saffron sage salmon sapphire satin scarlet sequoia shadow shark shell shepherd shovel silk silver sparrow
spider spruce squid stallion starling stork storm summit sunset swallow swan sycamore tango temple thistle
thorn thunder tiger timber topaz torch tortoise toucan tower trellis trout trumpet tulip tundra turnip turtle
tweed umber valley vanilla velvet violet viper vortex vulture walnut walrus warbler weasel whale wheat willow
windmill winter wolf wombat wren yarrow yew zebra zephyr zinc zinnia
""".split()

NAMES = """
Aaron Abigail Ada Adele Agnes Alan Alma Amos Anders Andrea Anita Anton Astrid Beatrice Benedict Bertram Bianca
Boris Bridget Bruno Calvin Camilla Carlos Cecilia Cedric Clara Conrad Cora Cyrus Dahlia Daphne Delia Dexter Diego
Dora Edgar Edith Edmund Elena Elias Elmer Elsa Emil Enid Erik Esther Eunice Fabian Felix Fiona Flora Frida Gideon
Gilbert Greta Gustav Harriet Hector Helga Henrik Hugo Igor Ines Ingrid Irene Isaac Jasper Joanna Jonas Judith
Julian Karin Kirsten Klaus Lara Leona Leopold Linus Lionel Lucia Lydia Magnus Marcel Marina Martha Matilda Milo
Miriam Nadia Nathan Nelly Nestor Nina Noel Olga Oscar Otto Pablo Paula Pedro Petra Phoebe Quentin Rafael Ramona
Renata Roland Rosa Rufus Ruth Selma Sigrid Silas Simone Stella Tamara Thelma Theodor Tobias Ursula Vera Victor
Vincent Viola Walter Wanda Wilma Xavier Yvonne Zelda Zoe
""".split()

ADJECTIVES = """
north south east west old new red blue green black white upper lower inner outer main second third little great
grand golden royal quiet
""".split()

ONSETS = "b c d f g h k l m n p r s t v w z br dr st tr".split()
RHYMES = "a e i o u an ar el en er il in on or us".split()

ATTRIBUTES = """
pass key|door code|badge number|access code|serial number|locker number|pin|room number|ticket number|order number
account number|phone extension|license key|launch code|seat number|file number|case number|booking reference
tracking number|password|token|magic number|safe combination|invoice number|gate code|alarm code|member number
part number|lot number|call sign|voucher|wifi key|garage code|deposit|price|weight|score|balance|fee|passcode
shelf number|build number|port number|customer id|batch number|postal code|entry code|flight number|secret number
""".replace("\n", "|").strip("|").split("|")

SETTINGS = """
retry_limit timeout port quota batch_size max_connections pool_size ttl threshold interval buffer_size worker_count
rate_limit backoff shard_count window depth priority offset seed
""".split()

COLOURS = "red blue green black white yellow purple orange silver gold pink brown".split()
