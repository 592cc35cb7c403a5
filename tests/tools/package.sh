#!/bin/bash
# package.sh - the Debian package from its building to its purge.
#
#     tests/tools/package.sh BUILD_DIR
#
# Builds it twice and compares the bytes. Then, in a mount namespace, lays an
# overlay over this machine's root, so that what dpkg does is seen nowhere else
# and gone at the end: installs, runs a job by the installed paths and
# configuration, upgrades over an edited configuration, removes, purges.
set -eu

fail()
{
    echo "package: $*" >&2
    exit 1
}

# Inside: $1 is the package, / the overlay.
if [ "${1:-}" = --inside ]; then
    package=$2
    conf=/etc/nightshift/nightshift.conf
    spool=/var/lib/nightshift/spool

    dpkg -i "$package" >/dev/null || fail "does not install"
    [ "$(dpkg-query -W -f '${db:Status-Status}' nightshift)" = installed ] ||
        fail "is not installed"
    [ -z "$(dpkg --verify nightshift)" ] || fail "files differ from its sums"
    [ "$(stat -c '%U:%G %a' $spool/in)" = 'nightshift:nightshift 2770' ] ||
        fail "the spool's rights: $(stat -c '%U:%G %a' $spool/in)"
    [ "$(stat -c '%U:%G %a' /etc/nightshift)" = 'root:nightshift 750' ] ||
        fail "the configuration's rights"
    nightshiftd --check-config || fail "the installed configuration is bad"

    # As the unit starts it, but for systemd.
    line=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/nightshiftd.service)
    setpriv --reuid=nightshift --regid=nightshift --clear-groups \
        --no-new-privs $line 2>/tmp/nightshiftd.log &
    daemon=$!
    echo '{"custom_id":"a","body":{"messages":[{"role":"user","content":"Hello"}],"max_tokens":16}}' \
        >$spool/in/job.jsonl.part
    mv $spool/in/job.jsonl.part $spool/in/job.jsonl
    for _ in $(seq 600); do
        [ -e $spool/out/job.jsonl ] && break
        kill -0 $daemon || break
        sleep 0.1
    done
    [ -e $spool/out/job.jsonl ] ||
        fail "no answer: $(cat /tmp/nightshiftd.log)"
    grep -q '"error": *null' $spool/out/job.jsonl ||
        fail "the job failed: $(cat $spool/out/job.jsonl)"
    kill -TERM $daemon
    wait $daemon || fail "the daemon ended with $?"

    # An upgrade leaves what was edited, and asks nobody.
    echo '# mine' >>$conf
    dpkg --force-confdef --force-confold -i "$package" >/dev/null ||
        fail "does not upgrade"
    grep -q '^# mine$' $conf || fail "an upgrade overwrote the configuration"

    dpkg -r nightshift >/dev/null || fail "does not go"
    [ -e $conf ] || fail "removal took the configuration"
    for left in /usr/sbin/nightshiftd /usr/bin/nightshift \
        /usr/share/nightshift /usr/lib/systemd/system/nightshiftd.service.d \
        /usr/lib/sysusers.d/nightshift.conf; do
        [ ! -e $left ] || fail "removal left $left"
    done
    dpkg -P nightshift >/dev/null || fail "can not be purged"
    [ ! -e /etc/nightshift ] || fail "purge left /etc/nightshift"
    [ -s $spool/out/job.jsonl ] || fail "purge took results along"
    ! dpkg-query -W nightshift >/dev/null 2>&1 || fail "dpkg still knows it"
    echo "installed, started, upgraded, removed, purged"
    exit 0
fi

build=$1
here=$(cd "$(dirname "$0")" && pwd)
package=$(scripts/deb.sh "$build")
sum=$(sha256sum <"$package")
scripts/deb.sh "$build" >/dev/null
[ "$sum" = "$(sha256sum <"$package")" ] || fail "two builds differ"
dpkg-deb -f "$package" Depends | grep -q 'librdkafka1' ||
    fail "Depends lacks the libraries: $(dpkg-deb -f "$package" Depends)"
[ -z "$(dpkg-deb -c "$package" | awk '$2 != "root/root"')" ] ||
    fail "files are not root's"
if command -v lintian >/dev/null; then # it is a hundred packages of Perl
    told=$(lintian --fail-on error,warning "$package" 2>&1) ||
        fail "lintian: $told"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$package" "$work/nightshift.deb"
cp "$here/package.sh" "$work/inside.sh"
mkdir "$work/top"
# The upper layer is memory: it may lie on whatever the machine's root is.
unshare --mount --propagation private --fork sh -e -c '
    mount -t tmpfs -o size=512m tmpfs "$1/top"
    mkdir "$1/top/upper" "$1/top/work" "$1/top/root"
    mount -t overlay overlay "$1/top/root" \
        -o "lowerdir=/,upperdir=$1/top/upper,workdir=$1/top/work"
    mount -t proc proc "$1/top/root/proc"
    mount --rbind /dev "$1/top/root/dev"
    mkdir "$1/top/root/package"
    cp "$1/nightshift.deb" "$1/inside.sh" "$1/top/root/package"
    exec chroot "$1/top/root" bash /package/inside.sh --inside \
        /package/nightshift.deb
' sh "$work"
