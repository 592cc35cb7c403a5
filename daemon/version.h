/* version.h - of the programs. engine_rev names arithmetic, this the release. */
#ifndef NS_DAEMON_VERSION_H
#define NS_DAEMON_VERSION_H

#define NS_VERSION "0.1.0"

#endif
