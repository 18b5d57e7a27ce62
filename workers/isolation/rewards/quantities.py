"""Quantities: units by what they measure, in several languages, and words that count things."""

from __future__ import annotations

import re

from workers.isolation.rewards.latex import names

CURRENCIES = "€£¥₹₩₽₺₫₦฿"
_QUANTITIES = {
    "length": ("nm nanometer nanometre 纳米", "mm millimeter millimetre 毫米 밀리미터 ミリ ミリメートル", "dm 分米",
               "cm centimeter centimetre centimetro 厘米 公分 센티미터 センチ センチメートル",
               "m meter metre metro 米 公尺 미터 メートル",
               "km kilometer kilometre kilometro 千米 公里 킬로미터 キロ キロメートル",
               "in inch inche 英寸 인치 インチ", "ft foot feet 英尺 피트 フィート", "yd yard",
               "mi mile 英里 마일 マイル"),
    "area": ("ha hectare 公顷 公頃 헥타르 ヘクタール", "亩 畝", "acre 英亩"),
    "mass": ("mg milligram 毫克 밀리그램 ミリグラム", "g gram gramme gramo 克 그램 グラム",
             "kg kilogram kilogramme kilogramo kilo 千克 公斤 킬로그램 キロ キログラム", "斤", "lb pound", "oz ounce",
             "ton tonne 吨 噸 톤 トン"),
    "time": ("ms millisecond 毫秒 ミリ秒", "s second sec seconde segundo 秒 秒钟 秒鐘 秒間 초",
             "min minute m minuto 分 分钟 分鐘 分間 분",
             "h hour hr hora heure 小时 小時 个小时 個小时 时 時 时间 時間 点 點 시 시간",
             "day dia jour 天 日 号 號 日間 일", "week semana semaine 周 週 星期 个星期 礼拜 週間 주 주일",
             "month mese 月 个月 個月 か月 ヶ月 カ月 월 달 개월", "year 年 年間 岁 歲 歳 才 년 세 살"),
    "half of the day": ("am", "pm"),
    "volume": ("ml mL milliliter millilitre 毫升 밀리리터 ミリリットル cm³ cc", "cl", "dL",
               "l L liter litre litro 升 리터 リットル dm³",
                "gallon gal", "quart", "pint", "cup 杯 잔"),
    "money": ("¥ yen yuan 元 圆 圓 块 塊 元钱 块钱 人民币 円 日元 엔 위안", "角 毛", "分",
              "cent penny pennie 美分 센트 セント",
              "$ dollar usd buck 美元 달러 ドル", "€ euro eur 欧元 歐元 유로 ユーロ",
              "£ pound gbp 英镑 파운드 ポンド", "₩ krw 원 韩元 韓元 ウォン", "₹ rupee inr rs 卢比",
              "₽ ruble rouble 卢布", "₺ lira", "₫ dong", "₦ naira", "฿ baht 泰铢", "peso 比索"),
    "temperature": ("C celsius 摄氏度 섭씨", "F fahrenheit 华氏度"),
    "power": ("W watt 瓦 瓦特", "kW kilowatt 千瓦"),
    "energy": ("J joule 焦耳", "kJ kilojoule", "cal calorie 卡", "kcal 千卡"),
    "food": ("kcal calorie 千卡 大卡 卡",),
    "other": ("V volt 伏特", "N newton 牛顿", "Hz hertz 赫兹")}
"""Names of units by what they measure; those of one text are one unit. A plural `s` is left out."""
_MEASURES = {name: {quantity: names for quantity, units in _QUANTITIES.items() for names in units
                    if name in names.split()} for units in _QUANTITIES.values() for name in " ".join(units).split()}
"""The unit that a name means in each quantity that it may measure: 分 are minutes, or a hundredth of 元."""
_NOUN = "(?:(?![半错錯误誤不非是的以多少左右上下内外倍方根分余又数數十百千万萬亿億])[\u4e00-\u9fff]){1,4}"
"""What is counted, such as 苹果; no word that changes the number."""
_COUNTER = re.compile(
    "[个個人名位口只隻头頭匹条條本册冊页頁张張支枝把件台辆輛艘架座栋间間家所层層楼棵株朵片颗顆粒根袋包箱盒瓶杯碗]"
    "(?:" + _NOUN + ")?|"
    "[桶筐束串双雙对對套组組班队隊排行列次回遍趟步种種类類项項道题題句字岁歲歳才倍点點度票场場枚羽軒階足着番問]|"
    "[개명권장대번회살세잔병쌍채척층칸통판점배도]|个人|人次|千瓦|千卡|摄氏度|つ|通り|番目|文字|마리|그루|송이|켤레|"
    "자루|문제|가지|사람")
_ALSO_COUNTED = frozenset(["cup", "cups", *"块塊周角点點分분杯잔"])
"""Units that may also count things, people or points."""
_SAYING = re.compile(r"(?:입니다|이다|이에요|예요|です|である|だ)\Z")
_PER, _SPEEDS = re.compile(r"\s*(?:/|\bper\b|每)\s*"), {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_POWER = re.compile(r"(?:(?P<two>(?:square|sq\.?)\s+|平方|제곱)|(?P<three>(?:cubic|cu\.?)\s+|立方|세제곱))?"
                    r"(?P<base>.+?)(?P<tail>\s+(?:squared|sq)\b|\s+(?:cubed|cu)\b)?", re.IGNORECASE)
_PLURAL = re.compile(r"(?!(?:unit|square|cube|degree|percent|time|other|total)s\Z)"
                     r"[a-z]{2,}[^\Wsiu]s|people|children|(?:wo)?men")
"""Things that are counted, in English. Words that may stand for any unit are none."""
SHORT_UNITS = names("sq cu") | {name for name in _MEASURES if name.isascii() and name.isalpha() and len(name) < 3}
NO_UNITS = names(
    "or not no never but is are was were plus minus add added subtracted divided multiplied modulo mod twice "
    "thrice double triple wrong incorrect false itself squared cubed power root factorial half halves quarter "
    "quarters third thirds fourths fifth fifths sixths sevenths eighths ninths tenth tenths hundredth hundredths "
    "thousandth thousandths dozen dozens hundreds thousands millions billions")
"""Words behind a number that change its meaning."""


def is_unit(word: str) -> bool:
    """Return whether a word in an East Asian script is a unit, such as 元, 米每秒 and 个苹果."""
    stem = _SAYING.sub("", word)
    return not stem or all(_measures(part) or _COUNTER.fullmatch(part) for part in stem.split("每"))


def _measures(name: str) -> dict[str, str]:
    """Return the unit, by what it measures, of a name that may say `square` or `cubic`; `sq` and `cu` may follow it."""
    if (found := _POWER.fullmatch(name)) and (mark := found["two"] or found["three"] or found["tail"]):
        power = "²" if found["two"] or mark.strip().lower().startswith("sq") else "³"
        if found["base"].lower() in ("unit", "units"):
            return {f"length{power}": "", "area" if power == "²" else "volume": ""}
        base = {kind: f"{units.split()[0]}{power}" for kind, units in units_of(found["base"]).items() if units}
        return next((_MEASURES[unit] for unit in base.values() if unit in _MEASURES),
                    {f"{kind}{power}": unit for kind, unit in base.items()})
    return _MEASURES.get(name, {})


def units_of(word: str) -> dict[str, str]:
    """Return the unit that a word means in each quantity that it may measure, of which one is a number of things;
    nothing if it is no unit that is known."""
    if len(parts := _PER.split(_SPEEDS.get(word.lower(), word))) == 2:
        above, below = map(units_of, parts)
        return {f"{one}/{other}": f"{above[one]}/{below[other]}" for one in above for other in below}
    names = [word, word.lower(), word.lower().removesuffix("s"), _SAYING.sub("", word)]
    found = next(filter(None, map(_measures, names)), {})
    counted = _COUNTER.fullmatch(names[-1]) or (word.isascii() and _PLURAL.fullmatch(names[1]))
    counts = names[-1] in _ALSO_COUNTED or (not found and names[1] not in NO_UNITS and counted)
    return {**found, "number": ""} if counts else found


def differ(one: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether two units are known and not the same, such as cm and m, or cm and kg. Two of money are compared
    as money: 块 and 角 may both count things, too. A rate may be named by what it is of: 5 km an hour are 5 km. A
    unit without a name, as in `square units`, is any of its quantity."""
    if ("/" in "".join(one)) != ("/" in "".join(other)):
        one, other = ({kind.partition("/")[0]: unit.partition("/")[0] for kind, unit in units.items()}
                      for units in (one, other))
    both = one.keys() & other.keys()
    return bool(one and other) and not any(
        one[each] == other[each] or "" in (one[each], other[each]) for each in both & {"money"} or both)
