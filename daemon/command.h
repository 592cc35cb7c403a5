/* command.h - the commands of nightshift(1), one function each.
 *
 * argv[0] is the command's name. Each returns the exit status (setup.h) and
 * has then said on standard error what went wrong. Results and lists go to
 * standard output, everything else to standard error.
 */
#ifndef NS_DAEMON_COMMAND_H
#define NS_DAEMON_COMMAND_H

int ns_command_run(int argc, char **argv);
int ns_command_validate(int argc, char **argv);
int ns_command_plan(int argc, char **argv);
int ns_command_inspect(int argc, char **argv);
int ns_command_tokenize(int argc, char **argv);
int ns_command_show(int argc, char **argv);
int ns_command_submit(int argc, char **argv);
int ns_command_status(int argc, char **argv);
int ns_command_watch(int argc, char **argv);
int ns_command_results(int argc, char **argv);
int ns_command_cancel(int argc, char **argv);
int ns_command_pause(int argc, char **argv);
int ns_command_resume(int argc, char **argv);
int ns_command_dlq(int argc, char **argv);
int ns_command_replay(int argc, char **argv);
int ns_command_db(int argc, char **argv);

/* "nightshift: TEXT" on standard error; returns `status`. */
int ns_command_fail(int status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
