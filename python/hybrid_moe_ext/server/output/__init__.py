"""What models write besides the answer itself: their reasoning and their calls of tools, in the formats of their templates.

A model's format is told by its chat template's text (formats.py). A reader (reader.py, harmony.py) takes the text as it comes,
and gives out reasoning and content as soon as they are certain, calls at the end. Each family's calls are a file of their own."""
