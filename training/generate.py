"""Examples of the generated tasks: reports with a summary, and small programming jobs that can be run.

Every function returns a dict: task, prompt, answer, key (what decides held-out or not), check (what the
evaluator needs). The answer is a function of the prompt alone, so a model can be sure of every token.
"""
import random

import words as W


def pick(r, xs):
    return xs[r.randrange(len(xs))]


def person(r):
    return pick(r, W.FIRST) + " " + pick(r, W.LAST)


def others(r, taken):
    while True:
        p = person(r)
        if p != taken:
            return p


# ---------------------------------------------------------------- reports

ASK = ("Summarize this {}.", "Write a short summary of this {}.", "Summarise the following {} in one or two sentences.",
       "What does this {} say? Answer briefly.", "Give me the key facts of this {}.")


def ask(r, what, body):
    return pick(r, ASK).format(what) + "\n\n" + body


def arrange(r, first, rest, noise):
    rest = rest[:]
    n = r.randrange(0, 3)
    rest += r.sample(noise, min(n, len(noise)))
    r.shuffle(rest)
    return " ".join([first] + rest)


def incident(r):
    service = pick(r, W.SERVICE_A) + "-" + pick(r, W.SERVICE_B)
    minutes = r.randrange(3, 300)
    day = f"{r.randrange(1, 29)} {pick(r, W.MONTHS)}"
    who, cause, fix = person(r), pick(r, W.CAUSES), pick(r, W.FIXES)
    clock = f"{r.randrange(24):02}:{r.randrange(60):02}"
    fixed = r.random() < 0.8
    first = pick(r, (f"On {day} the {service} stopped answering.", f"The {service} went down on {day}.",
                     f"Incident report: {service}, {day}.", f"Users could not reach the {service} on {day}."))
    rest = [pick(r, (f"The outage lasted {minutes} minutes.", f"It took {minutes} minutes until all was normal.",
                     f"Downtime: {minutes} minutes.", f"For {minutes} minutes nothing worked.")),
            pick(r, (f"The cause was {cause}.", f"Root cause: {cause}.", f"It was caused by {cause}.",
                     f"The logs point to {cause}."))]
    if fixed:
        rest.append(pick(r, (f"{who} solved it by {fix}.", f"{who} was on call and fixed it by {fix}.",
                             f"The problem went away after {who} tried {fix}.", f"Fixed by {who}, who ended it by {fix}.")))
        tail = f"{who} fixed it by {fix}."
    else:
        rest.append(pick(r, (f"{who} is still looking into it.", f"It is not fixed yet; {who} has taken the case.",
                             f"{who} is working on a fix.", f"The case stays open with {who}.")))
        tail = f"{who} is working on a fix."
    noise = [f"The first alarm came at {clock}.", f"{others(r, who)} informed the customers.", "No data was lost.",
             f"About {r.randrange(2, 90)} users were affected.", "A review will follow next week.", "The status page was updated."]
    answer = f"The {service} was down for {minutes} minutes on {day} because of {cause}. {tail}"
    facts = [service, f"{minutes} minutes", day, cause, who] + ([fix] if fixed else [])
    return ask(r, "incident report", arrange(r, first, rest, noise)), answer, facts


def ticket(r):
    company = pick(r, W.COMPANY_A) + " " + pick(r, W.COMPANY_B)
    number, product, problem = r.randrange(1000, 10000), pick(r, W.PRODUCTS), pick(r, W.PROBLEMS)
    who, promise, day = person(r), pick(r, W.PROMISES), pick(r, W.DAYS)
    urgent = r.random() < 0.4
    first = pick(r, (f"Ticket {number} from {company}.", f"{company} opened ticket {number}.", f"Support ticket {number}, customer {company}.",
                     f"{company} wrote to us, ticket {number}."))
    rest = [pick(r, (f"They say that {product} {problem}.", f"Problem: {product} {problem}.", f"Since the last update {product} {problem}.",
                     f"According to the customer, {product} {problem}.")),
            pick(r, (f"{who} will {promise} by {day}.", f"Until {day}, {who} wants to {promise}.", f"{who} promised to {promise} by {day}.",
                     f"Next step: {who} will {promise}, due {day}."))]
    if urgent:
        rest.append(pick(r, ("The case is urgent.", "Priority: urgent.", "The customer calls it urgent.", "This is urgent.")))
    noise = [f"{others(r, who)} took the call.", "The customer was friendly.", f"The contract number is {r.randrange(100, 1000)}.",
             "A screenshot is attached.", "They use the newest version.", f"The call took {r.randrange(2, 40)} minutes."]
    head = "Urgent: " if urgent else ""
    answer = f"{head}{company} reports in ticket {number} that {product} {problem}. {who} will {promise} by {day}."
    return ask(r, "support ticket", arrange(r, first, rest, noise)), answer, [company, str(number), f"{product} {problem}", who, promise, day]


def changelog(r):
    project = pick(r, W.PROJECTS)
    version = f"{r.randrange(1, 10)}.{r.randrange(0, 20)}.{r.randrange(0, 10)}"
    old = f"{r.randrange(1, 10)}.{r.randrange(0, 20)}"
    feature, bug, who = pick(r, W.FEATURES), pick(r, W.BUGS), person(r)
    breaking = r.random() < 0.4
    first = pick(r, (f"{project} {version} is out.", f"Release notes for {project} {version}.", f"Changes in {project} {version}:",
                     f"We are happy to announce {project} {version}."))
    rest = [pick(r, (f"New: {feature}.", f"This version adds {feature}.", f"You can now use {feature}.", f"Added {feature}.")),
            pick(r, (f"Fixed: {bug}.", f"It fixes {bug}.", f"We removed {bug}.", f"{who} repaired {bug}."))]
    if breaking:
        rest.append(pick(r, (f"Version {old} is no longer supported.", f"Support for {old} ends.", f"Please leave {old}, it gets no more updates.",
                             f"This is the end of {old}.")))
    noise = [f"Thanks to {others(r, who)} for testing.", "The manual was updated.", f"The download has {r.randrange(2, 90)} megabytes.",
             "Translations were improved.", f"{r.randrange(3, 60)} people contributed.", "The build is now faster."]
    answer = f"{project} {version} adds {feature} and fixes {bug}."
    facts = [f"{project} {version}", feature, bug]
    if breaking:
        answer += f" Support for version {old} ends."
        facts.append(old)
    return ask(r, "changelog", arrange(r, first, rest, noise)), answer, facts


def meeting(r):
    team, decision, who = pick(r, W.TEAMS), pick(r, W.DECISIONS), person(r)
    day = f"{r.randrange(1, 29)} {pick(r, W.MONTHS)}"
    budget = r.randrange(1, 100) * 100
    first = pick(r, (f"The {team} team met today.", f"Minutes of the {team} team.", f"Meeting of the {team} team.",
                     f"Notes from the {team} team."))
    has_budget = r.random() < 0.6
    rest = [pick(r, (f"It was decided to {decision} by {day}.", f"We will {decision}, at the latest on {day}.",
                     f"Decision: {decision} until {day}.", f"By {day} we want to {decision}.")),
            pick(r, (f"{who} is responsible.", f"{who} takes care of it.", f"Owner: {who}.", f"{who} will lead the work."))]
    if has_budget:
        rest.append(pick(r, (f"The budget is {budget} euros.", f"It may cost {budget} euros.", f"{budget} euros are set aside.",
                             f"Budget: {budget} euros.")))
    noise = [f"{others(r, who)} was ill.", f"{r.randrange(3, 20)} people took part.", "The coffee machine is broken again.",
             f"The next meeting is on {pick(r, W.DAYS)}.", "The last minutes were accepted.", f"{others(r, who)} wrote the minutes."]
    tail = f" with a budget of {budget} euros" if has_budget else ""
    answer = f"The {team} team decided to {decision} by {day}. {who} is responsible{tail}."
    facts = [team, decision, day, who] + ([f"{budget} euros"] if has_budget else [])
    return ask(r, "meeting report", arrange(r, first, rest, noise)), answer, facts


def report(r):
    kind = pick(r, (incident, ticket, changelog, meeting))
    prompt, answer, facts = kind(r)
    return {"task": "report", "kind": kind.__name__, "prompt": prompt, "answer": answer, "key": "|".join(facts), "check": {"facts": facts}}


# ---------------------------------------------------------------- SQL

def condition(r, texts, numbers, used):
    kinds = ["eq", "ne", "gt", "lt", "ge", "between"]
    while True:
        k = pick(r, kinds)
        c = pick(r, texts if k in ("eq", "ne") else numbers)
        if c not in used:
            break
    used.add(c)
    if k in ("eq", "ne"):
        v = pick(r, W.TEXT[c])
        if k == "eq":
            return k, pick(r, (f"{c} is {v}", f"the {c} is {v}", f"{c} equals {v}")), f"{c} = '{v}'"
        return k, pick(r, (f"{c} is not {v}", f"the {c} is not {v}")), f"{c} <> '{v}'"
    a = r.randrange(1, 1000) if r.random() < 0.5 else r.randrange(1, 20) * 10
    if k == "gt":
        return k, pick(r, (f"{c} is over {a}", f"{c} is greater than {a}", f"{c} is more than {a}")), f"{c} > {a}"
    if k == "lt":
        return k, pick(r, (f"{c} is below {a}", f"{c} is less than {a}", f"{c} is under {a}")), f"{c} < {a}"
    if k == "ge":
        return k, f"{c} is at least {a}", f"{c} >= {a}"
    b = a + r.randrange(5, 200)
    return k, f"{c} is between {a} and {b}", f"{c} BETWEEN {a} AND {b}"


AGG = {"sum": (("the sum of {}", "the total {}"), "SUM({})"), "avg": (("the average {}", "the mean {}"), "AVG({})"),
       "max": (("the highest {}", "the maximum {}"), "MAX({})"), "min": (("the lowest {}", "the minimum {}"), "MIN({})")}


def sql(r):
    table = pick(r, W.TABLES)
    texts = r.sample(sorted(W.TEXT), r.randrange(1, 3))
    numbers = r.sample(W.NUMBER, r.randrange(1, 3))
    columns = ["name"] + texts + numbers
    extra = columns[1:]
    r.shuffle(extra)
    columns = ["name"] + extra
    kind = pick(r, ("select", "select", "select", "count", "agg", "agg", "group", "group", "distinct", "update", "delete"))
    used, sig, conds = set(), [kind], []
    n = pick(r, (0, 1, 1, 1, 2)) if kind in ("select", "agg", "group") else pick(r, (1, 1, 2)) if kind in ("count", "update", "delete") else pick(r, (0, 1))
    n = min(n, len(columns) - 1)
    if kind == "group":
        g = pick(r, texts)
        used.add(g)
        n = min(n, 1)
        if len(columns) < 4:
            n = 0
    new = None
    if kind == "update":
        target = pick(r, texts + numbers)
        used.add(target)
        new = pick(r, W.TEXT[target]) if target in W.TEXT else r.randrange(1, 500)
        n = 1
    for _ in range(n):
        ok_t, ok_n = [c for c in texts if c not in used], [c for c in numbers if c not in used]
        if not ok_t and not ok_n:
            break
        k, say, code = condition(r, ok_t or ["\0"], ok_n or ["\0"], used | {"\0"})
        used.add(code.split()[0])
        conds.append((say, code))
        sig.append(k)
    say = " and ".join(c[0] for c in conds)
    where = " WHERE " + " AND ".join(c[1] for c in conds) if conds else ""
    when = pick(r, (" where ", " for which ", " whose ")) + say if conds else ""
    if when.startswith(" whose the "):
        when = " where " + say
    if kind == "select":
        cols = pick(r, (["name"], ["name"], ["*"], ["name", pick(r, columns[1:])], [pick(r, columns[1:])]))
        what = "all columns" if cols == ["*"] else "the " + " and ".join(cols)
        order = pick(r, ("", "", "asc", "desc", "top"))
        text = pick(r, ("Show {} of the {}{}", "List {} of all {}{}", "Give me {} of the {}{}")).format(what, table, when)
        code = f"SELECT {', '.join(cols)} FROM {table}{where}"
        if order:
            c = pick(r, numbers)
            if order == "asc":
                text += f", sorted by {c}"
                code += f" ORDER BY {c}"
            elif order == "desc":
                text += pick(r, (f", sorted by {c} from high to low", f", sorted by {c} descending", f", highest {c} first"))
                code += f" ORDER BY {c} DESC"
            else:
                k = r.randrange(2, 20)
                text += f", only the {k} with the highest {c}"
                code += f" ORDER BY {c} DESC LIMIT {k}"
        sig += [order, str(len(cols)), cols[0] if cols[0] in ("*", "name") else "col"]
    elif kind == "count":
        text = pick(r, ("How many {} are there{}", "Count the {}{}", "Give the number of {}{}")).format(table, when)
        code = f"SELECT COUNT(*) FROM {table}{where}"
    elif kind == "agg":
        a = pick(r, sorted(AGG))
        c = pick(r, numbers)
        text = pick(r, ("Show {} of the {}{}", "Find {} of all {}{}", "What is {} of the {}{}")).format(pick(r, AGG[a][0]).format(c), table, when)
        code = f"SELECT {AGG[a][1].format(c)} FROM {table}{where}"
        sig.append(a)
    elif kind == "group":
        a = pick(r, ("count", "sum", "avg", "max", "min"))
        if a == "count":
            text = pick(r, (f"Count the {table} of each {g}{when}", f"How many {table} are there for each {g}{when}"))
            f = "COUNT(*)"
        else:
            c = pick(r, numbers)
            text = pick(r, ("Show {} of the {} for each {}{}", "Find {} of the {} per {}{}")).format(pick(r, AGG[a][0]).format(c), table, g, when)
            f = AGG[a][1].format(c)
        code = f"SELECT {g}, {f} FROM {table}{where} GROUP BY {g}"
        if r.random() < 0.3:
            k = r.randrange(2, 50)
            text += f", only groups with more than {k} rows"
            code += f" HAVING COUNT(*) > {k}"
            sig.append("having")
        sig.append(a)
    elif kind == "distinct":
        c = pick(r, texts)
        text = pick(r, (f"List the different values of {c} in {table}{when}", f"Which values of {c} occur in {table}{when}"))
        code = f"SELECT DISTINCT {c} FROM {table}{where}"
    elif kind == "update":
        v = f"'{new}'" if isinstance(new, str) else str(new)
        text = pick(r, (f"Set {target} to {new} for all {table}{when}", f"Change {target} to {new} in the {table}{when}"))
        code = f"UPDATE {table} SET {target} = {v}{where}"
        sig.append("text" if isinstance(new, str) else "number")
    else:
        text = pick(r, (f"Delete all {table}{when}", f"Remove the {table}{when}"))
        code = f"DELETE FROM {table}{where}"
    schema = f"Table {table}({', '.join(columns)})."
    lead = pick(r, ("Write an SQL query.", "Write the SQL.", "Answer with SQL."))
    prompt = f"{lead} {schema}\n{text}."
    return {"task": "sql", "kind": kind, "prompt": prompt, "answer": code + ";", "key": ",".join(sig),
            "check": {"table": table, "columns": columns}}


# ---------------------------------------------------------------- Python and C

def keep_rule(r, v, c):
    """(name, words, condition) over the variable v; c: C syntax."""
    k = r.randrange(2, 60)
    land = "&&" if c else "and"
    rules = [("all", "", ""), ("all", "", ""), ("even", " that are even", f"{v} % 2 == 0"), ("odd", " that are odd", f"{v} % 2 != 0"),
             ("pos", " that are positive", f"{v} > 0"), ("neg", " that are negative", f"{v} < 0"),
             ("gt", f" greater than {k}", f"{v} > {k}"), ("lt", f" less than {k}", f"{v} < {k}"),
             ("div", f" divisible by {k % 9 + 2}", f"{v} % {k % 9 + 2} == 0"), ("ne", f" different from {k}", f"{v} != {k}"),
             ("range", f" between {k} and {k + 30}", f"{v} >= {k} {land} {v} <= {k + 30}")]
    return pick(r, rules)


def change_rule(r, v):
    k = r.randrange(2, 30)
    rules = [("id", "the numbers{}", v), ("id", "the numbers{}", v), ("sq", "the squares of the numbers{}", f"{v} * {v}"),
             ("mul", f"{k} times the numbers{{}}", f"{v} * {k}"), ("add", f"the numbers{{}} plus {k}", f"{v} + {k}"),
             ("sub", f"the numbers{{}} minus {k}", f"{v} - {k}"), ("cube", "the cubes of the numbers{}", f"{v} * {v} * {v}"),
             ("neg", "the negated numbers{}", f"-{v}")]
    return pick(r, rules)


def func_name(r):
    return pick(r, W.NAME_A) + "_" + pick(r, W.NAME_B)


def python_list(r):
    name = func_name(r)
    fn, fsay, fcode = keep_rule(r, "x", False)
    cn, csay, ccode = change_rule(r, "x")
    comp = f"{ccode} for x in xs" + (f" if {fcode}" if fcode else "")
    what = csay.format(fsay)
    agg = pick(r, ("list", "sum", "count", "max", "min", "sort", "rsort", "mean"))
    if agg == "list":
        say, code = f"a list of {what}", f"[{comp}]"
    elif agg == "sum":
        say, code = f"the sum of {what}", f"sum({comp})"
    elif agg == "count":
        cn = "id"
        say, code = "how many numbers" + (fsay or " there are").replace(" that", "", 1) if fsay.startswith(" that") else f"the count of the numbers{fsay}", \
            "len(xs)" if not fcode else f"sum(1 for x in xs if {fcode})"
        if fsay.startswith(" that"):
            say = f"the count of the numbers{fsay}"
    elif agg == "max":
        say, code = f"the largest of {what}, or 0", f"max(({comp}), default=0)"
    elif agg == "min":
        say, code = f"the smallest of {what}, or 0", f"min(({comp}), default=0)"
    elif agg == "sort":
        say, code = f"a sorted list of {what}", f"sorted({comp})"
    elif agg == "rsort":
        say, code = f"a list of {what}, largest first", f"sorted(({comp}), reverse=True)"
    else:
        fn, cn = "all", "id"
        say, code = "the mean of the numbers, or 0", "sum(xs) / len(xs) if xs else 0"
    lead = pick(r, ("Write a Python function", "Python: a function", "I need a Python function"))
    prompt = f"{lead} {name}(xs) that returns {say}."
    return prompt, f"def {name}(xs):\n    return {code}", f"py,{fn},{cn},{agg}", {"lang": "python", "name": name, "args": "list"}


def python_words(r):
    name = func_name(r)
    k = r.randrange(2, 9)
    letter = pick(r, "abcdefghilmnoprst")
    keep = pick(r, (("all", "", ""), ("long", f" longer than {k} letters", f"len(w) > {k}"), ("short", f" shorter than {k} letters", f"len(w) < {k}"),
                    ("start", f" that start with {letter}", f"w.startswith('{letter}')"), ("end", f" that end with {letter}", f"w.endswith('{letter}')"),
                    ("has", f" that contain {letter}", f"'{letter}' in w")))
    change = pick(r, (("id", "the words{}", "w"), ("upper", "the words{} in upper case", "w.upper()"), ("rev", "the words{} reversed", "w[::-1]"),
                      ("len", "the lengths of the words{}", "len(w)"), ("first", "the first letters of the words{}", "w[0]")))
    comp = f"{change[2]} for w in text.split()" + (f" if {keep[2]}" if keep[2] else "")
    agg = pick(r, ("list", "join", "count", "sort", "set"))
    if change[0] == "len" and agg == "join":
        agg = "list"
    what = change[1].format(keep[1])
    cn = change[0]
    if agg == "list":
        say, code = f"a list of {what}", f"[{comp}]"
    elif agg == "join":
        say, code = f"{what}, joined by commas", f"','.join({comp})"
    elif agg == "count":
        cn = "id"
        say, code = f"the count of the words{keep[1]}", f"sum(1 for w in text.split(){' if ' + keep[2] if keep[2] else ''})"
    elif agg == "sort":
        say, code = f"a sorted list of {what}", f"sorted({comp})"
    else:
        say, code = f"a set of {what}", f"set({comp})"
    lead = pick(r, ("Write a Python function", "Python: a function", "I need a Python function"))
    prompt = f"{lead} {name}(text) that returns {say}."
    return prompt, f"def {name}(text):\n    return {code}", f"pw,{keep[0]},{cn},{agg}", {"lang": "python", "name": name, "args": "text"}


def c_loop(r):
    name = func_name(r)
    fn, fsay, fcode = keep_rule(r, "v[i]", True)
    cn, csay, ccode = change_rule(r, "v[i]")
    agg = pick(r, ("sum", "count"))
    test = f"        if ({fcode})\n    " if fcode else ""
    if agg == "sum":
        say, act = f"the sum of {csay.format(fsay)}", f"        r += {ccode};\n"
    else:
        cn = "id"
        say, act = f"the count of the numbers{fsay}", "        r++;\n"
    lead = pick(r, ("Write a C function", "C: a function", "I need a C function"))
    prompt = f"{lead} int {name}(int *v, int n) that returns {say}."
    code = f"int {name}(int *v, int n)\n{{\n    int r = 0;\n    for (int i = 0; i < n; i++)\n{test}{act}    return r;\n}}"
    return prompt, code, f"cl,{fn},{cn},{agg}", {"lang": "c", "name": name, "args": "array"}


def c_plain(r):
    name = func_name(r)
    k = r.randrange(2, 100)
    inner = pick(r, (("sum", "the sum of a and b", "a + b"), ("diff", "a minus b", "a - b"), ("prod", "the product of a and b", "a * b"),
                     ("max", "the larger of a and b", "(a > b ? a : b)"), ("min", "the smaller of a and b", "(a < b ? a : b)"),
                     ("dist", "the distance between a and b", "(a > b ? a - b : b - a)")))
    outer = pick(r, (("id", "{}", "{}"), ("plus", f"{{}}, plus {k}", f"{{}} + {k}"), ("minus", f"{{}}, minus {k}", f"{{}} - {k}"),
                     ("times", f"{{}}, times {k}", f"{{}} * {k}")))
    body = inner[2]
    if outer[0] == "times" and not body.startswith("("):
        body = f"({body})"
    code = f"int {name}(int a, int b)\n{{\n    return {outer[2].format(body)};\n}}"
    lead = pick(r, ("Write a C function", "C: a function", "I need a C function"))
    prompt = f"{lead} int {name}(int a, int b) that returns {outer[1].format(inner[1])}."
    return prompt, code, f"cp,{inner[0]},{outer[0]}", {"lang": "c", "name": name, "args": "pair"}


def code(r):
    kind = pick(r, (python_list, python_list, python_words, c_loop, c_plain))
    prompt, answer, key, check = kind(r)
    return {"task": "code", "kind": kind.__name__, "prompt": prompt, "answer": answer, "key": key, "check": check}


MAKERS = {"report": report, "sql": sql, "code": code}

if __name__ == "__main__":
    rng = random.Random(1)
    for maker in MAKERS.values():
        for _ in range(8):
            e = maker(rng)
            print("---", e["key"], "\n" + e["prompt"], "\n=>", e["answer"])
