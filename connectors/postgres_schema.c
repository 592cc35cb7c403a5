#include "connectors/postgres_link.h"

/* The file itself, so that it can be read and run by hand as it stands. */
__asm__(".section .rodata\n"
        ".global ns_pg_schema_sql\n"
        "ns_pg_schema_sql:\n"
        ".incbin \"connectors/schema.sql\"\n"
        ".byte 0\n"
        ".previous\n");
