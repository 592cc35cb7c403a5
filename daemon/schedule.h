/* schedule.h - the engine thread's stage: feed, pass, collect.
 *
 * Owns the engine while the pipeline runs. Works that are ready wait here
 * while the engine has enough of its own, highest priority first; the planner
 * orders what the engine has. A job that took the process down before (two
 * stalls) runs alone, so that it can not take its neighbours along.
 */
#ifndef NS_DAEMON_SCHEDULE_H
#define NS_DAEMON_SCHEDULE_H

void *ns_schedule_thread(void *pipeline);

#endif
