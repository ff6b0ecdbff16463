#!/usr/bin/env bash
# Fetches documentation in English by Debian's own package client (Debian 12). Nothing is installed.
# Usage: fetch_documentation.sh DIR      then DIR/KIND.jsonl for each kind of text.
# A download that was interrupted goes on. KINDS chooses some kinds, as in KINDS="server essays".
set -euo pipefail
work=${1:?usage: fetch_documentation.sh DIR}
extract=$(cd "$(dirname "$0")" && pwd)/extract.py
mkdir -p "$work"/{lists/partial,cache/archives/partial,debs}
work=$(cd "$work" && pwd)
options="-o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache"
packages_of() {
  case $1 in
    python) echo python3.11-doc python-django-doc python-scipy-doc ;;
    database) echo postgresql-doc-15 sqlite3-doc ;;
    cplusplus) echo libboost1.74-doc libgtk-4-doc libglib2.0-doc ;;
    java) echo openjdk-17-doc ;;
    rust) echo rust-doc ;;
    haskell) echo ghc-doc ;;
    kernel) echo linux-doc-6.1 ;;
    server) echo apache2-doc git-doc nodejs-doc ;;
    user) echo gnome-user-docs libreoffice-help-en-us gimp-help-en debian-handbook \
      debian-reference-en installation-guide-amd64 ;;
    essays) echo anarchism debian-faq developers-reference ;;
    *) echo "unknown kind $1" >&2; exit 1 ;;
  esac
}
apt-get update -qq $options
for kind in ${KINDS:-python database cplusplus java rust haskell kernel server user essays}; do
  [ -e "$work/$kind.jsonl" ] && continue
  mkdir -p "$work/root"
  packages=$(packages_of "$kind")
  for package in $packages; do
    compgen -G "$work/debs/${package}_*.deb" > /dev/null ||
      (cd "$work/debs" && apt-get download -qq $options "$package")
    rm -rf "$work/root/$package"
    dpkg-deb -x "$work"/debs/"${package}"_*.deb "$work/root/$package"
  done
  nice python3 "$extract" "$work/$kind.jsonl" $(printf "$work/root/%s " $packages)
  rm -rf "$work/root"
done
