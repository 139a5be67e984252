"""The race: RATrain and what people use instead, on the same model, data, placement and links.

Here live the rows (`rows.toml`), the contenders (one file per tool), the arena that runs them in turns, and
what is made of their times. Nothing here is part of the product.
"""
