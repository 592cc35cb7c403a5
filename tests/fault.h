/* fault.h - the n-th allocation fails.
 *
 * Tests link with --wrap for malloc, calloc and realloc. After
 * fault_arm(n) the n-th allocation (from 0) returns NULL, once.
 */
#ifndef NS_TESTS_FAULT_H
#define NS_TESTS_FAULT_H

#include <stdbool.h>

void fault_arm(int n);
bool fault_fired(void); /* disarms, and says whether the failure happened */

#endif
