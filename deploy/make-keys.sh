#!/bin/sh
# The keys of a deployment: make-keys.sh FOLDER SILOS [NAME...]
#
#   FOLDER/authority/ca.key       signs certificates; no container sees it, keep it off the machines
#   FOLDER/superlink/             ca.crt, server.pem and server.key (TLS), nodes/silo-N.pub (who may connect)
#   FOLDER/silo-N/node/           ca.crt, and node.key: the SuperNode's own
#
# NAME... are the names by which the SuperLink is reached beside superlink and localhost, such as fl.example.org.
# Keys that are there are kept: called again with more silos, it makes those of the new ones.
set -eu
fail() { echo "deploy/make-keys.sh: $1" >&2; exit 2; }
[ $# -ge 2 ] || fail 'expected FOLDER SILOS [NAME...]'
folder=$1
silos=$2
shift 2
case $silos in '' | *[!0-9]*) fail "SILOS is a number, not '$silos'" ;; esac
for tool in openssl ssh-keygen; do
    command -v "$tool" > /dev/null || fail "$tool is not installed"
done
umask 077
authority_days=3650
days=365
mkdir -p "$folder/authority" "$folder/superlink/nodes"
cd "$folder"

if [ ! -e authority/ca.key ]; then
    openssl ecparam -name secp384r1 -genkey -noout -out authority/ca.key
    openssl req -new -x509 -key authority/ca.key -sha256 -days "$authority_days" -subj "/CN=fedpriv deployment" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -out authority/ca.crt
fi
if [ ! -e superlink/server.pem ] || [ $# -gt 0 ]; then
    names=DNS:superlink,DNS:localhost,IP:127.0.0.1
    for name; do
        case $name in *[!0-9.]*) names=$names,DNS:$name ;; *) names=$names,IP:$name ;; esac
    done
    openssl ecparam -name secp384r1 -genkey -noout -out superlink/server.key
    openssl req -new -key superlink/server.key -subj "/CN=superlink" -out authority/server.csr
    printf 'subjectAltName = %s\nextendedKeyUsage = serverAuth\n' "$names" > authority/server.cnf
    openssl x509 -req -in authority/server.csr -CA authority/ca.crt -CAkey authority/ca.key -CAcreateserial \
        -sha256 -days "$days" -extfile authority/server.cnf -out superlink/server.pem 2> /dev/null
fi
cp authority/ca.crt superlink/ca.crt
silo=0
while [ "$silo" -lt "$silos" ]; do
    node=silo-$silo/node
    if [ ! -e "superlink/nodes/silo-$silo.pub" ]; then
        mkdir -p "$node"
        cp authority/ca.crt "$node/ca.crt"
        ssh-keygen -q -t ecdsa -b 384 -N '' -C "silo-$silo" -f "$node/node.key"
        cp "$node/node.key.pub" "superlink/nodes/silo-$silo.pub"
    fi
    silo=$((silo + 1))
done
echo "keys of $silos silos: $folder"
