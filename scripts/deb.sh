#!/bin/sh
# deb.sh - the Debian package, from a staged `make install`.
#
#     scripts/deb.sh BUILD_DIR
#
# Leaves BUILD_DIR/nightshift_VERSION_ARCHITECTURE.deb. The same tree and
# compiler give the same bytes: times are those of the last commit, or
# $SOURCE_DATE_EPOCH.
set -eu
umask 022

build=$1
stage=$build/deb
version=$(sed -n 's/.*NS_VERSION "\(.*\)"/\1/p' base/version.h)
architecture=$(dpkg --print-architecture)
package=$build/nightshift_${version}_$architecture.deb
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null ||
    date -d "$(sed -n 's/^ -- .*>  //p' debian/changelog | head -n 1)" +%s)}
export SOURCE_DATE_EPOCH

rm -rf "$stage"
mkdir -p "$stage/DEBIAN" "$stage/etc/nightshift" "$stage/usr/share/doc/nightshift"
${MAKE:-make} -s install B="$build" DESTDIR="$stage" prefix=/usr >&2
strip --strip-unneeded "$stage/usr/bin/nightshift" "$stage/usr/sbin/nightshiftd"
find "$stage/usr/share/man" -type f -exec gzip -9n {} +
cp debian/copyright "$stage/usr/share/doc/nightshift"
install -D -m 644 debian/lintian-overrides \
    "$stage/usr/share/lintian/overrides/nightshift"
gzip -9nc debian/changelog >"$stage/usr/share/doc/nightshift/changelog.gz"
# As shipped, but that it has a place to take jobs from.
sed 's,^# spool = ,spool = ,' config/nightshift.conf \
    >"$stage/etc/nightshift/nightshift.conf"
echo /etc/nightshift/nightshift.conf >"$stage/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 debian/$script "$stage/DEBIAN"
done

# dpkg-shlibdeps wants a source tree around it.
mkdir -p "$build/shlibs/debian"
printf 'Source: nightshift\n\nPackage: nightshift\nArchitecture: any\n' \
    >"$build/shlibs/debian/control"
stage_path=$(cd "$stage" && pwd)
libraries=$(cd "$build/shlibs" && dpkg-shlibdeps -O --ignore-missing-info \
    "$stage_path/usr/bin/nightshift" "$stage_path/usr/sbin/nightshiftd" \
    2>shlibdeps.log | sed -n 's/^shlibs:Depends=//p')
if [ -z "$libraries" ]; then
    cat "$build/shlibs/shlibdeps.log" >&2
    exit 1
fi
size=$(du -k -s --apparent-size --exclude=DEBIAN "$stage" | cut -f 1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" \
    -e "s/@SIZE@/$size/" -e "s/@LIBRARIES@/$libraries/" debian/control \
    >"$stage/DEBIAN/control"
(cd "$stage" && find . -path ./DEBIAN -prune -o -type f -printf '%P\n' |
    LC_ALL=C sort | xargs md5sum) >"$build/md5sums"
mv "$build/md5sums" "$stage/DEBIAN/md5sums"
find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$stage" "$package" >/dev/null
echo "$package"
