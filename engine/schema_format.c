#include <string.h>

#include "engine/schema_private.h"

/* Leap years by their last digits, as the calendar has them. */
#define LEAP                                                                 \
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|"                          \
    "(?:[02468][048]|[13579][26])00)"
#define DATE                                                                 \
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"          \
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"                                 \
    "02-(?:0[1-9]|1[0-9]|2[0-8]))|" LEAP "-02-29)"
#define HOUR "(?:[01][0-9]|2[0-3])"
#define TIME                                                                 \
    HOUR ":[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:[Zz]|[+-]" HOUR         \
         ":[0-5][0-9])"
#define BYTE "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4 BYTE "(?:\\." BYTE "){3}"
#define H16 "[0-9A-Fa-f]{1,4}"
/* What may be the last 32 bits of an address. */
#define LS32 "(?:" H16 ":" H16 "|" IPV4 ")"
/* RFC 3986, 3.2.2, turn by turn: the more stands behind ::, the less before. */
#define IPV6                                                                 \
    "(?:(?:" H16 ":){6}" LS32 "|::(?:" H16 ":){5}" LS32 "|(?:" H16           \
    ")?::(?:" H16 ":){4}" LS32 "|(?:(?:" H16 ":){0,1}" H16 ")?::(?:" H16     \
    ":){3}" LS32 "|(?:(?:" H16 ":){0,2}" H16 ")?::(?:" H16 ":){2}" LS32      \
    "|(?:(?:" H16 ":){0,3}" H16 ")?::" H16 ":" LS32 "|(?:(?:" H16            \
    ":){0,4}" H16 ")?::" LS32 "|(?:(?:" H16 ":){0,5}" H16 ")?::" H16         \
    "|(?:(?:" H16 ":){0,6}" H16 ")?::)"
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOST LABEL "(?:\\." LABEL ")*"
#define ATEXT "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define PCHAR "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
/* RFC 3986: what comes behind a scheme or stands alone. */
#define AUTHORITY                                                            \
    "(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?(?:\\[" IPV6      \
    "\\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
#define TAIL                                                                 \
    "(?:\\?(?:" PCHAR "|[/?])*)?(?:#(?:" PCHAR "|[/?])*)?"
#define SCHEME "[A-Za-z][A-Za-z0-9+.-]*:"
#define PATHS "//" AUTHORITY "(?:/" PCHAR "*)*|/(?:" PCHAR "+(?:/" PCHAR "*)*)?"

/* Each is the whole of the string. Where a standard knows no end of digits,
 * there is one here, so that no document can go on for ever. */
static const struct {
    const char *name, *pattern;
    uint32_t most; /* characters in all; 0 is no limit */
} formats[] = {
    /* RFC 3339, without leap seconds; nine digits of a second at most. */
    { "date", "^" DATE "$", 0 },
    { "time", "^" TIME "$", 0 },
    { "date-time", "^" DATE "[Tt]" TIME "$", 0 },
    /* RFC 3339, appendix A; nine digits of each at most. */
    { "duration",
      "^P(?:[0-9]{1,9}W|(?:(?:[0-9]{1,9}D|[0-9]{1,9}M(?:[0-9]{1,9}D)?|"
      "[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?)(?:T(?:[0-9]{1,9}S|"
      "[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?"
      "))?|T(?:[0-9]{1,9}S|[0-9]{1,9}M(?:[0-9]{1,9}S)?|"
      "[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?)))$", 0 },
    /* RFC 4122 */
    { "uuid", "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", 0 },
    { "ipv4", "^" IPV4 "$", 0 },
    { "ipv6", "^" IPV6 "$", 0 },
    /* RFC 1123 */
    { "hostname", "^" HOST "$", 253 },
    /* RFC 5321, 4.1.2: a dotted or a quoted name at a host or an address */
    { "email",
      "^(?:" ATEXT "(?:\\." ATEXT ")*|\"(?:[ !#-\\[\\]-~]|\\\\[ -~])*\")@(?:"
      HOST "|\\[(?:" IPV4 "|IPv6:" IPV6 ")\\])$", 0 },
    /* RFC 3986 */
    { "uri",
      "^" SCHEME "(?:" PATHS "|" PCHAR "+(?:/" PCHAR "*)*)?" TAIL "$", 0 },
    { "uri-reference",
      "^(?:" SCHEME "(?:" PATHS "|" PCHAR "+(?:/" PCHAR "*)*)?|" PATHS
      "|(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})+(?:/" PCHAR "*)*|)"
      TAIL "$", 0 },
    /* RFC 6901 */
    { "json-pointer", "^(?:/(?:[^/~]|~[01])*)*$", 0 },
    { "relative-json-pointer",
      "^(?:0|[1-9][0-9]{0,8})(?:#|(?:/(?:[^/~]|~[01])*)*)$", 0 },
};

const char *
ns_schema_format(const char *format, uint32_t *most)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(*formats); i++)
        if (strcmp(formats[i].name, format) == 0) {
            *most = formats[i].most ? formats[i].most : UINT32_MAX;
            return formats[i].pattern;
        }
    return NULL;
}
