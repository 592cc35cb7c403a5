/* The parsers of Python and of C that tool.h names, over tool.c. */
#include "daemon/tool.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { PYTHON_NO = 3, CC_NO = 1, CC_CRASHED = 4 };

/* What may be said of an answer: one line, of printable bytes. */
static void
keep_line(char *says, const char *line)
{
    size_t n = strcspn(line, "\n");

    memmove(says, line, n);
    says[n] = '\0';
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)says[i] < ' ')
            says[i] = ' ';
}

/* The line that begins with `start` and has `word` in it; NULL: none. */
static const char *
find_line(const char *says, const char *start, const char *word)
{
    for (const char *line = says; line; line = strchr(line, '\n')) {
        const char *found;

        line += *line == '\n';
        found = strstr(line, word);
        if (strncmp(line, start, strlen(start)) == 0 && found &&
            found < line + strcspn(line, "\n"))
            return line;
    }
    return NULL;
}

static bool
over_limit(struct ns_tool_answer *answer)
{
    snprintf(answer->says, sizeof(answer->says),
             "does not parse within the tool's limits");
    return false;
}

/* That the tool fails says nothing of the code. */
static bool
tool_failed(const char *tool, const struct ns_tool_answer *answer,
            enum ns_status *status, struct ns_error *err)
{
    *status = ns_fail(err, NS_RETRY, "%s fails with exit status %d", tool,
                      answer->exit_status);
    return false;
}

/* ---- Python ------------------------------------------------------------- */

bool
ns_tool_python(const char *python, const char *code, size_t length,
               struct ns_tool_answer *answer, enum ns_status *status,
               struct ns_error *err)
{
    /* Isolated, without site packages. A status of its own tells code that
     * does not parse from an interpreter that does not start. */
    static const char script[] =
        "import sys\n"
        "def no(text, line):\n"
        "    text = '\\nno: %s%s\\n' % (text[:120], line and\n"
        "                             ' in line %d' % line or '')\n"
        "    sys.stdout.buffer.write(text.encode('utf-8', 'replace'))\n"
        "    sys.stdout.flush()\n"
        "    sys.exit(3)\n"
        "try:\n"
        "    compile(sys.stdin.buffer.read(), '<answer>', 'exec', 0, True)\n"
        "except (SyntaxError, ValueError) as e:\n"
        "    no(str(getattr(e, 'msg', e)), getattr(e, 'lineno', 0))\n"
        "except BaseException as e:\n"
        "    no(type(e).__name__ + ' while it was parsed', 0)\n";
    const char *const argv[] = { python, "-I", "-S", "-B",
                                 "-W", "ignore", "-c", script, NULL };
    const char *line;

    *status = ns_tool_run(argv, code, length, answer, err);
    if (*status != NS_OK || answer->exit_status == 0)
        return *status == NS_OK;
    if (answer->exit_status == -1)
        return over_limit(answer);
    if (answer->exit_status != PYTHON_NO)
        return tool_failed(python, answer, status, err);
    line = find_line(answer->says, "no: ", "");
    keep_line(answer->says, line ? line + strlen("no: ") : "does not parse");
    return false;
}

/* ---- C ------------------------------------------------------------------ */

/* Directives that name files, found as a compiler finds them, but for one
 * thing: what stands in a comment or in a text counts too. Whether it does can
 * be told only by knowing C as well as the compiler does, and who knows it a
 * little less can be talked into overlooking a line. */
struct text {
    const char *code;
    size_t length, at, line;
};

static bool
is_blank(int c)
{
    return c == ' ' || c == '\t' || c == '\f' || c == '\v' || c == '\0';
}

static bool
is_newline(int c)
{
    return c == '\n' || c == '\r';
}

/* The next byte behind any splices, blanks behind whose backslash are let pass
 * as compilers do; -1: no more. */
static int
peek(struct text *text)
{
    while (text->at < text->length && text->code[text->at] == '\\') {
        size_t end = text->at + 1;

        while (end < text->length && is_blank(text->code[end]))
            end++;
        if (end == text->length || !is_newline(text->code[end]))
            break;
        if (text->code[end] == '\r' && end + 1 < text->length &&
            text->code[end + 1] == '\n')
            end++;
        text->at = end + 1;
        text->line++;
    }
    return text->at < text->length ? (unsigned char)text->code[text->at] : -1;
}

static int
take(struct text *text)
{
    int c = peek(text);

    if (c != -1)
        text->at++;
    text->line += c == '\n';
    return c;
}

static void
skip_comment(struct text *text)
{
    for (int c = take(text), last = 0; c != -1; c = take(text)) {
        if (last == '*' && c == '/')
            return;
        last = c;
    }
}

static void
skip_blank(struct text *text)
{
    for (;;) {
        struct text ahead;

        while (is_blank(peek(text)))
            take(text);
        ahead = *text;
        if (take(&ahead) != '/' || take(&ahead) != '*')
            return;
        skip_comment(&ahead);
        *text = ahead;
    }
}

static void
take_word(struct text *text, char *out, size_t room)
{
    size_t n = 0;

    skip_blank(text);
    while (isalnum(peek(text)) || peek(text) == '_') {
        int c = take(text);

        if (n + 1 < room)
            out[n++] = (char)c;
    }
    out[n] = '\0';
}

/* <a plain path>, looked for in the compiler's folders alone, or "a plain
 * name", looked for in / first. A macro may be anything. */
static bool
harmless_operand(struct text *text)
{
    int open, c, last = 0;
    size_t n = 0;

    skip_blank(text);
    open = take(text);
    if (open != '<' && open != '"')
        return false;
    for (; (c = take(text)) != (open == '<' ? '>' : '"'); n++) {
        if (!isalnum(c) && (c <= 0 || !strchr("_+-./", c)))
            return false;
        if ((c == '/' && (n == 0 || open == '"')) || (c == '.' && last == '.'))
            return false;
        last = c;
    }
    return n > 0;
}

static bool
harmless_directive(struct text text) /* behind its # */
{
    char word[24];

    take_word(&text, word, sizeof(word));
    if (strstr(word, "include") || strcmp(word, "import") == 0 ||
        strcmp(word, "embed") == 0)
        return harmless_operand(&text);
    if (strcmp(word, "pragma") != 0)
        return true;
    take_word(&text, word, sizeof(word));
    if (strcmp(word, "GCC") != 0)
        return true;
    take_word(&text, word, sizeof(word));
    return strcmp(word, "dependency") != 0;
}

/* A # that only blanks and comments can stand in front of in its line. */
bool
ns_tool_c_is_harmless(const char *code, size_t length, size_t *line)
{
    struct text text = { code, length, 0, 1 };
    int before = '\n', before_that = 0;

    if (length >= 3 && memcmp(code, "\xef\xbb\xbf", 3) == 0)
        text.at = 3;
    for (int c = take(&text); c != -1; c = take(&text)) {
        bool begins = is_newline(before) || (before_that == '*' &&
                                             before == '/');
        struct text behind = text;

        *line = text.line;
        if (begins && (c == '#' || (c == '%' && take(&behind) == ':')) &&
            !harmless_directive(behind))
            return false;
        if (!is_blank(c)) {
            before_that = before;
            before = c;
        }
    }
    return true;
}

bool
ns_tool_c(const char *cc, const char *code, size_t length,
          struct ns_tool_answer *answer, enum ns_status *status,
          struct ns_error *err)
{
    const char *const argv[] = { cc, "-fsyntax-only", "-pipe", "-x", "c",
                                 "-std=gnu17", "-w", "-fmax-errors=1",
                                 "-fno-diagnostics-show-caret",
                                 "-fdiagnostics-color=never", "-", NULL };
    const char *said;
    size_t line;

    *status = NS_OK;
    if (!ns_tool_c_is_harmless(code, length, &line)) {
        snprintf(answer->says, sizeof(answer->says),
                 "line %zu names a file that is no header of the compiler's "
                 "own, or may be", line);
        return false;
    }
    *status = ns_tool_run(argv, code, length, answer, err);
    if (*status != NS_OK || answer->exit_status == 0)
        return *status == NS_OK;
    if (answer->exit_status == -1 || answer->exit_status == CC_CRASHED)
        return over_limit(answer);
    if (answer->exit_status != CC_NO)
        return tool_failed(cc, answer, status, err);
    /* What it says of another file may be what stands in that file. */
    said = find_line(answer->says, "<stdin>:", "error: ");
    keep_line(answer->says, said ? said : "does not parse");
    return false;
}

/* ---- are they what they are said to be? ----------------------------------- */

typedef bool parse(const char *tool, const char *code, size_t length,
                   struct ns_tool_answer *answer, enum ns_status *status,
                   struct ns_error *err);

static enum ns_status
try_tool(parse *parses, const char *tool, const char *key, const char *good,
         const char *bad, struct ns_error *err)
{
    struct ns_tool_answer answer;
    enum ns_status status = ns_tool_check(tool, key, err);
    bool right;

    if (status != NS_OK)
        return status;
    right = parses(tool, good, strlen(good), &answer, &status, err);
    if (right)
        right = !parses(tool, bad, strlen(bad), &answer, &status, err);
    if (status != NS_OK) {
        ns_context(err, "%s", key);
        return err->status = NS_REJECT;
    }
    return right ? NS_OK
                 : ns_fail(err, NS_REJECT, "%s: %s does not tell code that "
                           "parses from code that does not", key, tool);
}

enum ns_status
ns_tool_try_python(const char *python, struct ns_error *err)
{
    return try_tool(ns_tool_python, python, "validators.python", "x = 1\n",
                    "x = (\n", err);
}

enum ns_status
ns_tool_try_c(const char *cc, struct ns_error *err)
{
    return try_tool(ns_tool_c, cc, "validators.cc",
                    "#include <stddef.h>\nsize_t x;\n", "int x = (\n", err);
}
