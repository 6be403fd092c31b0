"""Plain words: a text is some of them in any order, which is all that prefill looks at."""

from __future__ import annotations

__all__ = ["WORDS"]

_TEXT = """
above across after again almost already among another apple around baker basket because before behind below
bench better between boat bread bridge bring broken brother build butter candle carry castle centre chair change
cheese child choose city clean climb clock cloud coast coffee cold colour common copper corner cotton country
cover cross dance decide deep desert different dinner distance doctor double dream early earth easy eight empty
engine enough evening every example farmer father feather field finger finish fish flower follow forest forget
fresh friend front garden gather gentle glass golden green ground harbour harvest hidden honest horse hundred
island journey kitchen ladder language letter library listen little market measure message middle minute modern
morning mother mountain narrow nature never number ocean orange orchard order other paper pencil people picture
planet pocket present promise quarter quiet rather reason river round sailor school second seldom seven shadow
shelter silver simple sister slowly station stone story straight stranger street strong summer table teacher
thirty thread together tomorrow travel under until valley village visit voice wagon water weather whisper window
winter wonder wooden yellow
"""

WORDS = tuple(_TEXT.split())
