#!/bin/bash
# Unpacks CRIU 4.1 from Debian's next release into FOLDER without touching the system: the CRIU of Debian 12 does not start
# on kernels from 6.15 on (vDSO layout). The apt source is the machine's own with the suite replaced; lists and cache are
# private to FOLDER. Afterwards FOLDER/criu-run starts it through its own loader and libraries.
set -euo pipefail
folder=$(mkdir -p "${1:?usage: fetch.sh FOLDER}" && cd "$1" && pwd)
[ -x "$folder/criu-run" ] && exit 0
suite=${CRIU_SUITE:-trixie}
state=$folder/apt; mkdir -p "$state"/{lists/partial,cache/archives/partial,etc} "$folder/root" "$folder/deb"

own_source() {  # "URI keyring" of the machine's main Debian archive, from either format of apt's configuration
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        awk '/^URIs:/ {uri=$2} /^Signed-By:/ {key=$2} /^$/ {if (uri ~ /\/debian\/?$/) {print uri, key; exit}}
             END {if (uri ~ /\/debian\/?$/) print uri, key}' "$file"
    done
    [ ! -e /etc/apt/sources.list ] || awk '$1=="deb" && $0 ~ /\/debian\/? / {for (i=2;i<=NF;i++) if ($i ~ /:\/\//) {print $i, ""; exit}}' /etc/apt/sources.list
}
read -r uri key < <(own_source | head -1)
echo "deb [${key:+signed-by=$key }arch=$(dpkg --print-architecture)] $uri $suite main" > "$state/etc/sources.list"
apt=(-o Dir::Etc::SourceList="$state/etc/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$state/lists"
     -o Dir::Cache="$state/cache" -o APT::Get::List-Cleanup=0 -o APT::Sandbox::User=root)
apt-get -qq "${apt[@]}" update
packages=(criu libc6 libprotobuf-c1 libnl-3-200 libnet1 libnftables1 libnftnl11 libmnl0 libgnutls30t64 libbsd0 libmd0 libcap2
          libxtables12 libgmp10 libjansson4 libedit2 libtinfo6 libhogweed6t64 libnettle8t64 libp11-kit0 libidn2-0 libtasn1-6
          libunistring5 libffi8 libuuid1 libdrm2 libbrotli1 libzstd1 zlib1g)
(cd "$folder/deb" && apt-get -qq "${apt[@]}" download "${packages[@]}")
for deb in "$folder"/deb/*.deb; do dpkg -x "$deb" "$folder/root"; done
libraries=$(find "$folder/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
loader=$(find "$folder/root" -name 'ld-linux*.so*' | head -1)
program=$(find "$folder/root" -path '*sbin/criu' | head -1)
printf '#!/bin/sh\nexec %q --library-path %q %q "$@"\n' "$loader" "$libraries" "$program" > "$folder/criu-run"
chmod +x "$folder/criu-run"
rm -rf "$state" "$folder/deb"
