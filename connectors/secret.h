/* secret.h - a secret that stands in a file of its own. Thread: any. */
#ifndef NS_CONNECTORS_SECRET_H
#define NS_CONNECTORS_SECRET_H

#include <stddef.h>

#include "base/error.h"

enum { NS_SECRET_BYTES = 4096 };

/* The first line of the file, into `out`, which the caller wipes. `name` is
 * the setting's, for the error. NS_REJECT: it can not be read, is too long, or
 * could be read by others: refused before it is used. */
enum ns_status ns_secret_read(const char *path, const char *name,
                              char out[NS_SECRET_BYTES],
                              struct ns_error *err);

#endif
