"""The family or branch of a language, by its code."""

from __future__ import annotations

import re

# Branches of Indo-European and families, as Glottolog 5 (https://glottolog.org) has them. Codes are
# ISO 639's; a creole stands with the language of its words.
_CODES = {
    "Romance": (
        "an ast ca egl es ext fr frp gl ht it lij lmo nap oc pms pt rm ro roa scn sdc vec wa"
    ),
    "Germanic": "af da de fo frr fy gsw hrx is ksh lb nb nds nl nn no sco sli stq sv yi",
    "Slavic": "be bg bs cs dsb hr hsb mk pl rsk ru rue sh sk sl sr szl uk",
    "Celtic": "br cy ga gd",
    "Baltic": "lt lv prg",
    "Greek, Albanian and Armenian": "el grc hy sq",
    "Indo-Aryan": ("as awa bho bn doi dv gu hi hif kok ks mai mr ne or pa pnb sa sd si skr ur"),
    "Iranian": "bcc bgn ckb diq fa kmr ku lki lrc os ps tg",
    "Uralic": "et fi hu koi kv mdf mhr mrj myv olo se smn udm vep vro",
    "Turkic": "alt az azb ba crh cv kaa kjh kk krc ky sah tk tr tt tyv ug uz",
    "Mongolic": "bxr mn xal",
    "Afro-Asiatic": "acm am ar ary arz ha he kab mt om so ti",
    "Caucasian": "ce inh ka xmf",
    "Dravidian": "kn ml ta tcy te",
    "Sino-Tibetan": "blk brx dz lzh mni my wuu yue zh",
    "Japanese and Korean": "ja ko",
    "Austroasiatic": "km vi",
    "Tai-Kadai": "lo shn tdd th",
    "Austronesian": ("ban bcl bew bjn btm fil hil id ilo jv kge ljp mg mi min ms su szy tet war"),
    "Niger-Congo": ("bci ff gur guw ig kcg mos nr nso ny rw ss st sw tn ts ve wo xh yo zu"),
    "Constructed": "avk eo ia ie io isv lfn tok vo",
}
_FAMILIES = {code: family for family, codes in _CODES.items() for code in codes.split()}
OTHER = "Other"


def family(language: str) -> str:
    """Returns the family of a language.

    Args:
      language: a code, with or without a script, a region or a variant, such as "sr_Latn" or
        "ca@valencia".
    """
    return _FAMILIES.get(re.split("[_@-]", language)[0], OTHER)
