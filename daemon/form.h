/* form.h - the form that a job gives its answer, as a grammar.
 *
 * Here the two sides meet: connectors/ knows the field, engine/ the grammar.
 * Thread: any; nothing is shared.
 */
#ifndef NS_DAEMON_FORM_H
#define NS_DAEMON_FORM_H

#include "connectors/job.h"
#include "engine/grammar.h"

/* NULL in `out` where any text will do; else the caller's to destroy.
 * NS_REJECT: bad_param, unsupported, grammar_limit; `param` names the field. */
enum ns_status ns_form_grammar(const struct ns_job *job,
                               struct ns_grammar **out, struct ns_error *err);

#endif
