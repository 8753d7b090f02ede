"""The words that generated tasks are made of: common English ones, which most vocabularies hold whole. Data only."""

from __future__ import annotations

# Things that are asked for: keys, values and names. No two tasks of a document share one.
THINGS = tuple(
    """
    anchor apple arrow autumn badge bamboo banjo barrel basket beacon bottle branch bridge bronze bucket button cabin
    candle canyon carpet castle cedar cherry circle cobalt coffee comet copper coral cotton cradle crane crystal curtain
    daisy desert diamond dragon drum eagle ember engine falcon feather fiddle flame forest fossil fountain garden garlic
    ginger glacier globe granite guitar hammer harbor harvest hazel helmet hickory honey horizon island ivory jacket
    jasmine jungle kernel kettle ladder lagoon lantern laurel lemon leopard lily lion lizard lotus magnet mango maple
    marble meadow melon mirror monkey mountain museum needle nickel nutmeg oak ocean olive onion orange orchid otter
    oyster paddle palace panther parrot peach pebble pepper piano pillow pine planet plaza pocket pony poppy prairie
    puzzle pyramid quartz rabbit raven ribbon river rocket saddle saffron salmon sapphire scarf shadow shell silver
    spider spring spruce statue stone summer sunset swan temple thunder tiger timber tower trumpet tulip tunnel turtle
    valley velvet violet walnut whale willow window winter wolf zebra
    """.split()
)

FIRST_NAMES = tuple(
    """
    Adam Alice Anna Arthur Beth Carl Clara David Diana Edward Ellen Emma Eric Ethan Frank George Grace Hannah Harold
    Helen Henry Irene Jack James Jane Julia Karen Kevin Laura Lewis Lucy Maria Martin Mary Nancy Oliver Oscar Paul Peter
    Rachel Robert Rose Ruth Samuel Sarah Simon Susan Thomas Victor Walter
    """.split()
)
LAST_NAMES = tuple(
    """
    Baker Barnes Bell Bennett Brooks Burton Carter Clark Cole Collins Cooper Cross Davis Dixon Evans Fisher Foster Gibson
    Grant Gray Green Hall Harris Hill Holmes Hughes Hunt Jenkins Johnson Kelly King Lane Lewis Marsh Mason Mills Moore
    Morgan Murray Nelson Parker Porter Price Reed Rogers Shaw Stone Turner Walker Young
    """.split()
)
TRADES = tuple(
    """
    actor architect artist baker barber builder butcher captain carpenter chemist clerk cook dancer doctor driver editor
    farmer fisherman gardener guard hunter judge lawyer librarian merchant miller miner nurse painter pilot poet priest
    printer sailor singer soldier surgeon tailor teacher writer
    """.split()
)
TOWNS = tuple(
    """
    Aberdeen Athens Berlin Boston Bristol Cairo Cardiff Chester Chicago Dallas Delhi Denver Dover Dublin Durham Florence
    Geneva Glasgow Hamburg Houston Kingston Lima Lisbon London Madrid Milan Moscow Munich Naples Oslo Oxford Paris
    Phoenix Prague Quebec Rome Salem Sydney Tokyo Toronto Vienna Warsaw York Zurich
    """.split()
)
EVENTS = tuple(
    """
    asked about the price of bread in the market|came home late because the road was closed|lost a letter on the way to
    the station|bought a small boat from an old friend|spent the whole morning in the library|told a long story about
    the war|watched the rain from the kitchen window|planted a row of trees behind the house|wrote to the council about
    the broken bridge|waited for the train with two heavy bags|found a coin under the floor of the barn|read the paper
    twice and said nothing|invited the neighbours to supper|walked along the river until it was dark|painted the door of
    the shop again|slept badly and rose before the sun|carried the chairs into the hall|sold the last of the winter
    apples|counted the money and locked the drawer|heard the bells from the other side of town
    """.replace("\n", " ").split("|")
)
