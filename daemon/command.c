#include "daemon/command.h"

#include <stdarg.h>
#include <stdio.h>

int
ns_command_fail(int status, const char *format, ...)
{
    va_list ap;

    fputs("nightshift: ", stderr);
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    return status;
}
