/* version.h - the release's number, and the part of engine_rev that changes
 * whenever results may differ by a bit for the same job and seed. */
#ifndef NS_BASE_VERSION_H
#define NS_BASE_VERSION_H

#define NS_VERSION "0.1.0"
#define NS_NUMERICS "1"

#endif
