#include "connectors/postgres_link.h"

/* The files themselves, so that they can be read and run by hand as they
 * stand. */
#define EMBED(name, path)            \
    __asm__(".section .rodata\n"     \
            ".global " name "\n"     \
            name ":\n"               \
            ".incbin \"" path "\"\n" \
            ".byte 0\n"              \
            ".previous\n")

EMBED("ns_pg_schema_sql", "connectors/schema.sql");
EMBED("ns_pg_schema_2_sql", "connectors/schema_2.sql");
