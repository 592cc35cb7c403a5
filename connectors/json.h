/* json.h - telling a failed allocation inside jansson from a mistake.
 *
 * jansson (2.14) ignores a failed allocation while it collects a string, and
 * goes on with the string cut; or it takes the failure for a mistake in the
 * text. Either would be a job answered, or refused, for what it never said. So
 * its allocator, still malloc and free, notes failures for the thread.
 *
 *     ns_json_watch();
 *     root = json_loadb(...);
 *     if (ns_json_starved())   also when root is not NULL
 *
 * Thread: any; the note is the thread's own. The allocator is set before main.
 */
#ifndef NS_CONNECTORS_JSON_H
#define NS_CONNECTORS_JSON_H

#include <stdbool.h>

void ns_json_watch(void);   /* forgets former failures */
bool ns_json_starved(void); /* an allocation failed since */

#endif
