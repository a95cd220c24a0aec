"""The formats of strings that structured outputs know, as expressions. What they let through has the format."""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_CLOCK_DURATION = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = (
    f"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK_DURATION})?|{_CLOCK_DURATION}"
    "|[0-9]+W)"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "(?:{full}|{shortened})".format(
    full=f"(?:{_GROUP}:){{7}}{_GROUP}",
    shortened="|".join(
        f"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
        if before < 7
        else f"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::"
        for before in range(1, 8)
    ),
)
# Two hyphens at the third place would say that a label is encoded.
_LETTER, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_LABEL = f"{_LETTER}(?:{_INNER}{{0,2}}{_LETTER}|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,57}}{_LETTER})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_WORD = r"[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_WORD}(?:\.{_WORD}){{0,7}}@{_HOSTNAME}"
_PATH_CHARACTER = r"(?:[0-9A-Za-z._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][0-9A-Za-z+.-]*:(?://(?:{_HOSTNAME}|{_IPV4}|\[{_IPV6}\])(?::[0-9]{{1,5}})?(?:/{_PATH_CHARACTER}*)*"
    rf"|/?{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hostname": _HOSTNAME,
    "email": _EMAIL,
    "uri": _URI,
}
"""Narrower than the formats where an expression cannot say more: no leap seconds and no year 0; at most nine digits of
a second; capital T and Z; host names of up to four labels, none of them encoded; mail addresses without quotes, and
not at numbers; URIs without user names; IPv6 without dots."""
