"""A fixed text that every accuracy is measured on, unless another one is given."""

PASSAGES = (
    """\
A lighthouse is a tower with a bright light at the top. It stands on a coast or on a rock in the sea, and shows \
sailors where they are. For a long time the light was a fire of wood or coal, which a keeper had to feed all night. \
Later came lamps that burned oil, and mirrors behind them that threw the light in one direction. In 1822 the French \
engineer Augustin Fresnel built a lens out of many rings of glass. It was far thinner than a lens in one piece, and \
it bent almost all of the light of the lamp into a beam that could be seen more than thirty kilometers away. Every \
lighthouse has its own pattern of flashes, so that a captain who counts the seconds between them can find the tower \
on a chart. Today most of the lamps are electric, and nobody lives in the towers any more. Ships know their position \
from satellites. But when the electronics fail in a storm, an old light on the horizon is still the best thing that \
a crew can hope to see.""",
    """\
To bake a simple loaf of bread you need four things: 500 grams of flour, 350 grams of warm water, 10 grams of salt \
and a small spoon of dry yeast. First, mix the flour and the salt in a large bowl. Stir the yeast into the water, wait \
five minutes until there are bubbles, and pour it over the flour. Mix everything with your hand until no dry flour is \
left. Cover the bowl with a cloth and let the dough rest for two hours in a warm place. It should become twice as \
large. Then put some flour on the table, take the dough out of the bowl, fold it four times and form a round loaf. Let \
it rest for another forty minutes. Meanwhile, heat the oven to 230 degrees. Cut the top of the loaf with a sharp \
knife, so that it can open, and bake it for about thirty-five minutes. The bread is ready when it is dark brown and \
sounds hollow when you knock on the bottom. Do not cut it while it is hot: wait for one hour, and the inside will be \
soft and easy to slice.""",
    """\
Question: Why does the sea taste of salt, when the rivers that flow into it do not?

Answer: Rivers carry salt too, but so little that you cannot taste it. Rain takes up carbon dioxide from the air, which\
 makes it slightly acidic. As the water runs over rocks, it dissolves small amounts of minerals, among them sodium and \
chloride, and takes them along to the sea. When the sun warms the sea, water evaporates and becomes clouds, but the \
minerals stay behind. Over many millions of years they have added up to about 35 grams in each liter. Some of the \
chloride also came from volcanoes, on land and under the water.

Question: Does the sea become saltier every year?

Answer: Hardly. Salt also leaves the water: some of it becomes part of the mud on the sea floor, some is used by \
animals to build their shells, and some is blown onto the land with the spray of the waves. What comes in and what \
goes out are almost the same, so the amount in the water changes very slowly.""",
)
"""Plain prose, instructions, and questions with answers: about 200 tokens each."""
