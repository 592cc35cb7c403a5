/* deliver.h - the sink thread's stage: the only one that touches the store.
 *
 * Takes what the queue holds, groups it by operation and asks the store once
 * for each group: blocks first, so that they lie there before their job ends
 * or is given back. When the store says that the world is at fault, the same
 * call is made again, with growing delays, while everything behind it waits
 * and the window fills: results are never dropped for a full disk.
 */
#ifndef NS_DAEMON_DELIVER_H
#define NS_DAEMON_DELIVER_H

void *ns_deliver_thread(void *pipeline);

#endif
