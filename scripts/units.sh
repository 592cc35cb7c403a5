#!/bin/sh
# units.sh - whether systemd understands our units, and how exposed they leave us.
#
#     scripts/units.sh BUILD_DIR
#
# Looks at them as `make install` lays them out, with each program where the
# build has it. Needs no running systemd.
set -u

build=$1
root=$build/units
at=$root/lib/systemd/system
failed=0

# systemd's own scale of exposure, 0 to 100. What is left open stands in
# systemd/hardening.conf with its reason; a line that goes from there shows here.
most_exposed=17

rm -rf "$root"
mkdir -p "$at"
for unit in systemd/*.service systemd/*.target systemd/*.timer; do
    sed "s,/usr/local/s*bin,$(cd "$build" && pwd),g" "$unit" \
        >"$at/${unit##*/}" || exit 1
done
for unit in "$at"/*.service; do
    mkdir "$unit.d" && cp systemd/hardening.conf "$unit.d" || exit 1
done

# All at once, so that they may name each other. A warning counts.
said=$(systemd-analyze verify --man=no "$at"/*.service "$at"/*.target \
    "$at"/*.timer 2>&1 | grep nightshift)
if [ -n "$said" ]; then
    echo "$said"
    failed=1
fi
for unit in "$at"/*.service; do
    if ! said=$(systemd-analyze security --no-pager --offline=true \
        --threshold=$most_exposed "$unit" 2>&1); then
        echo "$said" | grep -v '✓'
        failed=1
    fi
done

# The template is the service, for one instance.
body()
{
    grep -v -e '^#' -e '^Description=' -e '^Environment=CUDA' "$1" | sed \
        -e 's,nightshift/%i\.conf,nightshift/nightshift.conf,' \
        -e 's,nightshift/%i$,nightshift,'
}
body systemd/nightshiftd.service >"$root/service"
body systemd/nightshiftd@.service | diff "$root/service" - || failed=1
exit $failed
