/* http_private.h - the status page, for http.c. */
#ifndef NS_DAEMON_HTTP_PRIVATE_H
#define NS_DAEMON_HTTP_PRIVATE_H

extern const char ns_http_page[]; /* http_page.html, and a NUL */

#endif
