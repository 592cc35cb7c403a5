#include "daemon/http_private.h"

/* The file itself, so that a browser can open it as it stands. */
__asm__(".section .rodata\n"
        ".global ns_http_page\n"
        "ns_http_page:\n"
        ".incbin \"daemon/http_page.html\"\n"
        ".byte 0\n"
        ".previous\n");
