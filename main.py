"""The entry of mkdocs-macros: what the macros of each page gave, `calc.site` knows already."""

from calc.site.macros.rendered import give as on_pre_page_macros

__all__ = ["on_pre_page_macros"]
