"""WrongScript: finds texts whose letters do not belong to their language.

Sources, under the Unicode License v3:
https://github.com/unicode-org/cldr-json/tree/47.0.0/cldr-json/cldr-core/supplemental
languageData.json has the scripts that each language is written in, likelySubtags.json the likely
one, and aliases.json codes of three letters. Latin letters as a second way of writing a language
are left out: the rows they would allow are mostly English. In place of Hans, Hant, Jpan and Kore
stand the scripts of their characters: Hani, Hira, Kana and Hang.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence

import regex

from lingvo_gshard.core import UserError
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.names import listed

# Scripts, by the codes of ISO 15924 -> codes of languages that are written in them.
LANGUAGES = {
    "Adlm Latn": "ff fuc ful",
    "Aghb Cyrl": "lez",
    "Arab": (
        "aeb apc apd arq ars ary arz bal bcc bej bgn bqi brh ckb dcc fa fas fia gbz gjk gju glk "
        "haz hnd hno khw kvx kxp lah lki lrc luz mfa mvy mzn pbu per pes pnb prd ps pus rmt sdh "
        "skr swb trw ur urd wni zdj"
    ),
    "Arab Cham": "cja cjm",
    "Arab Copt Grek": "cop",
    "Arab Cyrl": "inh kaz kk ug uig",
    "Arab Cyrl Latn": "az aze azj kir kmr ku kur ky tg tgk tk tly ttt tuk uz uzb uzn",
    "Arab Deva": "kas ks",
    "Arab Deva Khoj Sind": "sd snd",
    "Arab Deva Takr": "dgo doi",
    "Arab Guru": "pa pan",
    "Arab Latn": "dyo ha hau id ind may ms msa sus tr tur wo wol zsm",
    "Arab Latn Osma": "so som",
    "Arab Latn Tfng": "shi",
    "Arab Rohg": "rhg",
    "Arab Syrc": "ar ara arb",
    "Arab Tibt": "bft",
    "Armi Nbat Palm": "arc",
    "Armn": "arm hy hye",
    "Avst": "ae ave",
    "Bali Java Kawi": "kaw",
    "Bali Latn": "ban",
    "Bamu": "bax",
    "Batk Latn": "bbc",
    "Beng": "as asm ben bn bpy grt rkt",
    "Beng Cakm": "ccp",
    "Beng Deva": "unr unx",
    "Beng Deva Olck Orya": "sat",
    "Beng Latn": "kha lus",
    "Beng Mtei": "mni",
    "Beng Sylo": "syl",
    "Bopo Hani Phag": "chi cmn zh zho",
    "Bugi Latn": "bug mak mdr",
    "Buhd Latn": "bku",
    "Cans": "crj crk crl crm csw nsk oj ojg oji ojs",
    "Cans Latn": "chp cr cre cwd den ike iku iu xsl",
    "Cari": "xcr",
    "Cher": "chr",
    "Cprt": "ecy",
    "Cyrl": (
        "ab abk abq ady alt av ava ba bak be bel bg bua bul bxr ce che chm chu chv ckt crh cu cv "
        "dar dng evn gld kbd kca kjh koi kpy krc kum lbe mac mdf mhr mk mkd mns mrj myv nog os "
        "oss ru rue rus sah sel tab tat tt tyv ude udm uk ukr xal yrk"
    ),
    "Cyrl Grek": "pnt",
    "Cyrl Latn": "bos bs cjs gag kaa lfn mol rmy ro rom ron rum se sme sr srp tkr",
    "Cyrl Mong Phag": "khk mn mon",
    "Cyrl Perm": "kom kpv kv",
    "Cyrl Syrc": "aii",
    "Deva": (
        "anp awa bap bfy bgc bhb bhi bho bih bjj bra brx btv dhd dty gbm gvr him hne hoj jml kfr "
        "kfy khn knn kru mag mgp mrd mtr mup mwr ne nep new noe npi raj rjs sck srx swv tdh thl "
        "thq thr tkt wbr wtm xnr xsr"
    ),
    "Deva Gran Shrd Sidd Sinh": "cls sa san",
    "Deva Latn": "gom hif kok",
    "Deva Latn Orya Telu": "kxv",
    "Deva Limb": "lif",
    "Deva Mahj": "hi hin",
    "Deva Modi": "mar mr",
    "Deva Mymr Sinh Thai": "pi pli",
    "Deva Telu": "gno gon",
    "Deva Tibt": "taj tdg",
    "Deva Tirh": "mai",
    "Deva Wara": "hoc",
    "Dsrt Latn Shaw": "en eng",
    "Dupl Latn": "fr fra fre",
    "Egyp": "egy",
    "Elba Latn": "alb als sq sqi",
    "Ethi": "am amh byn gez ti tig tir wal",
    "Ethi Latn": "gaz om orm",
    "Geor": "geo ka kat xmf",
    "Geor Latn": "lzz",
    "Goth": "got",
    "Grek": "bgx el ell grc gre tsd",
    "Gujr": "gu guj",
    "Hang Hani": "ko kor",
    "Hani": "gan hak hsn lzh nan wuu yue",
    "Hani Hira Kana": "ja jpn",
    "Hani Latn": "vi vie za zha zyb",
    "Hano Latn": "hnn",
    "Hebr": "aju he heb iw ji jpr jrb lad ydd yi yid",
    "Hebr Samr": "sam",
    "Hmng Latn": "hea hmn",
    "Hmnp Laoo": "hnj",
    "Ital Latn": "ett osc xum",
    "Java Latn": "jav jv",
    "Kali": "eky kyu",
    "Kana": "ryu",
    "Kana Latn": "ain",
    "Khmr": "khm km",
    "Knda": "kan kn tcy",
    "Lana": "nod",
    "Laoo": "kjg lao lo",
    "Latn": (
        "aa aar abr ace ach ada af afr agq ak aka akz ale aln amo an ang ann aoz arg arn aro arp "
        "arw asa ast atj avk ay aym ayr baq bar bas bbj bci bcl bem bew bez bfd bi bik bin bis "
        "bjn bjt bkm bla blo bmq bqv br bre bsc bss bto buc bum bvb bxk byv bze bzx ca cad car "
        "cat cay cch ccr ceb ces cgg ch cha chk chn cho chy cic clc co cor cos cps crg crs cs csb "
        "cy cym cze da dak dan dav del dgr dik din diq dje dnj dsb dtm dtp dua dum dut dyu ebu ee "
        "efi egl eka ekk enm eo epo es esk est esu et eu eus ewe ewo ext fan fao fat ffm fi fij "
        "fin fit fj fo fon frc frm fro frp frr frs fry fud fuq fur fuv fvr fy ga gaa gay gba gbo "
        "gcr gd gil gl gla gle glg glv gmh gn goh gor gos grb grn gsw gub guc gug gur guz gv gwi "
        "gya hai hat haw hdn her hil hmo ho hop hr hrv hsb ht hu hun hup hur hz ia iba ibb ibo "
        "ice ido ie ife ig ik ikt ile ilo in ina io ipk is isl it ita izh jam jbo jgo jmc jut jw "
        "kab kac kaj kal kam kao kau kcg kck kde kea ken kfo kg kge kgp khq ki kik kin kiu kj kkj "
        "kl kln kmb knc knf kng kon kos kpe kr kri krj krl ksb ksf ksh kua kut kvr kw kwk la lag "
        "laj lam lat lav lb lbw len lg li lij lil lim lin lit liv ljp lkt lld lmo ln lol loz lt "
        "ltg ltz lu lua lub lug lui lun luo lut luy lv lvs mad maf mah mao mas maz mdh mdt mer "
        "mfe mfv mg mgh mgo mgy mh mhn mi mic min mlg mls mlt mo moe moh mos mri mt mua mus mwk "
        "mwl mwv mxc myx na nap naq nau nav nb nbl nch nd ndc nde ndo nds ng ngl nhe nhw nia nij "
        "niu njo nl nld nmg nn nnh nno no nob nor nov nr nso nus nv nxq ny nya nym nyn nyo nzi oc "
        "oci ojw oka pag pam pap pau pcd pcm pdc pdt pfl pis pko pl plt pms pol pon por ppl pqm "
        "prg pro pt puu qu quc que qug quz rap rar rcf rgn ria rm rmf rmo rmu rn rng rob rof roh "
        "rtm rug run rup rw rwk sad saf sag saq sas sbp sc scn sco scs sdc see sef seh sei ses sg "
        "sgs sid sk sl sli slk slo slv sly sm sma smj smn smo sms sn sna snf snk sot spa spy src "
        "srd srn srr ss ssw ssy st stq suk sv sw swa swe swg swh sxn syi szl tah tem teo ter tet "
        "tiv tkl tl tli tmh tn tnr to tog tok ton tpi trv ts tsg tsi tsn tso ttj ttq tum tvl twi "
        "twq ty uli umb umu ve vec ven vep vic vls vmf vmw vo vol vot vro vun wa wae war was wbp "
        "wel wln wls xav xh xho xog xpe yao yap yav ybb yo yor yrl yua zag zai zap zea zmi zu zul "
        "zun zza"
    ),
    "Latn Mend": "men",
    "Latn Mroo": "mro",
    "Latn Nkoo": "bam bm emk man mnk",
    "Latn Ogam": "sga",
    "Latn Pauc": "ctd",
    "Latn Rjng": "rej",
    "Latn Runr": "de deu ger",
    "Latn Sora": "srb",
    "Latn Sund": "su sun",
    "Latn Syrc": "tru",
    "Latn Tagb": "tbw",
    "Latn Tfng": "rif tzm",
    "Latn Tglg": "fil tgl",
    "Latn Vaii": "vai",
    "Lepc": "lep",
    "Lina": "lab",
    "Linb": "gmy",
    "Lisu": "lis",
    "Lyci": "xlc",
    "Lydi": "xld",
    "Mand": "myz",
    "Mani": "xmn",
    "Merc": "xmr",
    "Mlym": "mal ml",
    "Mong": "mnc",
    "Mymr": "bur kht mnw my mya shn",
    "Narb": "xna",
    "Nkoo": "nqo",
    "Orkh": "otk",
    "Orya": "or ori ory",
    "Osge": "osa",
    "Phli Phlp": "pal",
    "Phnx": "phn",
    "Plrd": "hmd",
    "Prti": "xpr",
    "Runr": "non",
    "Samr": "smp",
    "Sarb": "xsa",
    "Saur": "saz",
    "Sinh": "si sin",
    "Syrc": "cld syr",
    "Tale": "tdd",
    "Talu": "khb",
    "Taml": "bfq ta tam",
    "Tavt": "blt",
    "Telu": "lmn te tel wbq",
    "Tfng": "zen zgh",
    "Thaa": "div dv",
    "Thai": "kdt kxm lcp lwl sou th tha tts",
    "Tibt": "bo bod dz dzo tib tsj",
    "Ugar": "uga",
    "Xpeo": "peo",
    "Xsux": "akk hit",
    "Yiii": "ii iii",
}
_LATIN = "Latn"
# Subtags that name the script of a variant: of zh-Hant, and in names of locales such as sr@latin.
_CHARACTERS_OF = {
    "hans": ("Hani",),
    "hant": ("Hani",),
    "jpan": ("Hani", "Hira", "Kana"),
    "kore": ("Hang", "Hani"),
    "arabic": ("Arab",),
    "bengali": ("Beng",),
    "cyrillic": ("Cyrl",),
    "devanagari": ("Deva",),
    "iqtelif": (_LATIN,),
    "latin": (_LATIN,),
}
_SEPARATOR = re.compile(r"[-_@.]")
_LAST_USUAL = 0xFFFF
_LETTER = re.compile(r"[^\W\d_]")


class WrongScript:
    """Decides whether most letters of a text are outside of the scripts of its language.

    Letters that several scripts share, digits and punctuation do not count. A language whose
    scripts are not known accepts all.
    """

    def __init__(self, most: float, given: Sequence[str] = ()):
        """Prepares the rule.

        Args:
          most: largest share of letters outside of the language's scripts.
          given: "language=Script+Script" for languages whose scripts differ from the table's.

        Raises:
          UserError: one of `given` is malformed, or names an unknown script.
        """
        self._most = most
        self._given = _parsed(given)
        self._rules: dict[str, tuple[bool, _ForeignLetters | None]] = {}

    def __call__(self, language: str, text: str) -> bool:
        """Returns whether a text of a language is in a wrong script."""
        rule = self._rules.get(language)
        if rule is None:
            rule = self._rules[language] = self._rule(language)
        is_latin, foreign = rule
        if foreign is None or (is_latin and text.isascii()):
            return False
        outside = foreign.count(text)
        return outside > 0 and outside > self._most * len(_LETTER.findall(text))

    def _rule(self, language: str) -> tuple[bool, _ForeignLetters | None]:
        scripts = self._given.get(language) or scripts_of(language)
        return _LATIN in scripts, _foreign_letters(scripts) if scripts else None


@functools.lru_cache(maxsize=4096)
def scripts_of(language: str) -> tuple[str, ...]:
    """Returns the scripts of a language, by their codes in ISO 15924; () if they are not known.

    Args:
      language: a code such as de, pt_BR, zh-Hant, sr@latin or deu_Latn. A script that it names is
        the only one.
    """
    code, *subtags = _SEPARATOR.split(language)
    for subtag in subtags:
        if subtag.lower() in _CHARACTERS_OF:
            return _CHARACTERS_OF[subtag.lower()]
        if subtag.title() in _known_scripts():
            return (subtag.title(),)
    return _table().get(code.lower(), ())


@functools.cache
def _table() -> Mapping[str, tuple[str, ...]]:
    return {
        code: tuple(scripts.split())
        for scripts, codes in LANGUAGES.items()
        for code in codes.split()
    }


@functools.cache
def _known_scripts() -> frozenset[str]:
    return frozenset(script for scripts in LANGUAGES for script in scripts.split())


@functools.cache
def _all_letters() -> str:
    return "".join(_LETTER.findall("".join(map(chr, range(sys.maxunicode + 1)))))


class _ForeignLetters:
    """Counts the letters of a text that are outside of some scripts.

    The patterns list ranges of letters: re searches ranges several times faster than regex searches
    a property. re has a fast table only for characters up to U+FFFF, so higher characters have a
    separate pattern.
    """

    def __init__(self, scripts: tuple[str, ...]):
        own = "".join(rf"\p{{sc={script}}}" for script in (*scripts, "Zyyy", "Zinh"))
        codes = [ord(letter) for letter in regex.findall(rf"[^{own}]", _all_letters())]
        self._usual = _runs_of([code for code in codes if code <= _LAST_USUAL])
        self._rare = _runs_of([code for code in codes if code > _LAST_USUAL])

    def count(self, text: str) -> int:
        """Returns the number of letters outside of the scripts."""
        found = self._usual.findall(text)
        if max(text, default="") > chr(_LAST_USUAL):
            found += self._rare.findall(text)
        return sum(map(len, found)) if found else 0


_foreign_letters = functools.lru_cache(maxsize=256)(_ForeignLetters)


def _runs_of(codes: Sequence[int]) -> re.Pattern[str]:
    """Returns a pattern of runs of characters; `codes` are sorted."""
    body = "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges_of(codes))
    return re.compile(f"[{body}]+")


def ranges_of(codes: Sequence[int]) -> list[list[int]]:
    """Returns the first and the last code of each range of neighbors among sorted ones."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def _parsed(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    parsed = {}
    for entry in listed(given):
        language, equals, scripts = entry.partition("=")
        chosen = tuple(scripts.split("+"))
        if not language or not equals or not all(chosen):
            raise UserError(
                f"input.cleaning.scripts has {entry!r}; 'language=Script' or "
                "'language=Script+Script' was expected, such as 'mni=Mtei'"
            )
        for script in chosen:
            where = f"input.cleaning.scripts has {entry!r}"
            names.check(script, _known_scripts(), f"{where}: {script!r} is no script of ISO 15924")
        parsed[language] = chosen
    return parsed
