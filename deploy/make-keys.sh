#!/bin/sh
# The keys of a deployment: make-keys.sh FOLDER SILOS [NAME...]
#
#   FOLDER/authority/ca.key       signs certificates; no container sees it, keep it off the machines
#   FOLDER/superlink/             ca.crt, server.pem and server.key (TLS), nodes/silo-N.pub (who may connect)
#   FOLDER/silo-N/node/           ca.crt, and node.key: the SuperNode's own
#
# NAME... are the names by which the SuperLink is reached beside superlink and localhost, such as fl.example.org.
# Keys that are there are kept: called again with more silos, it makes those of the new ones, for which it needs no
# ca.key, and a SuperLink that runs takes them in.  Without its ca.key it signs nothing, and makes no other authority.
# Called as root, it gives new files owner and mode of those beside them.
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
signs=no
if [ ! -e "$folder/superlink/server.pem" ] || [ $# -gt 0 ]; then signs=yes; fi
if [ ! -e "$folder/authority/ca.key" ]; then
    for trusted in "$folder"/superlink/ca.crt "$folder"/authority/ca.crt "$folder"/silo-*/node/ca.crt; do
        [ ! -e "$trusted" ] || [ "$signs" = no ] ||
            fail "$folder/authority/ca.key is not there, and silos trust its $trusted: put it back to sign server.pem"
    done
fi
mkdir -p "$folder/superlink/nodes"
cd "$folder"

# like FILE BESIDE: FILE gets owner and group of BESIDE, and its mode if BESIDE is a file.
like() {
    [ ! -f "$2" ] || chmod --reference="$2" "$1"
    [ "$(id -u)" != 0 ] || chown --reference="$2" "$1"
}

if [ "$signs" = yes ]; then
    mkdir -p authority
    if [ ! -e authority/ca.key ]; then
        openssl ecparam -name secp384r1 -genkey -noout -out authority/ca.key
        openssl req -new -x509 -key authority/ca.key -sha256 -days "$authority_days" -subj "/CN=fedpriv deployment" \
            -addext "keyUsage=critical,keyCertSign,cRLSign" -out authority/ca.crt
    fi
    names=DNS:superlink,DNS:localhost,IP:127.0.0.1
    for name; do
        case $name in *[!0-9.]*) names=$names,DNS:$name ;; *) names=$names,IP:$name ;; esac
    done
    openssl ecparam -name secp384r1 -genkey -noout -out superlink/server.key
    openssl req -new -key superlink/server.key -subj "/CN=superlink" -out authority/server.csr
    printf 'subjectAltName = %s\nextendedKeyUsage = serverAuth\n' "$names" > authority/server.cnf
    openssl x509 -req -in authority/server.csr -CA authority/ca.crt -CAkey authority/ca.key -CAcreateserial \
        -sha256 -days "$days" -extfile authority/server.cnf -out superlink/server.pem 2> /dev/null
    cp authority/ca.crt superlink/ca.crt
    for made in superlink/server.key superlink/server.pem superlink/ca.crt; do like "$made" superlink; done
fi
silo=0
while [ "$silo" -lt "$silos" ]; do
    node=silo-$silo/node
    public=superlink/nodes/silo-$silo.pub
    if [ ! -e "$public" ]; then
        beside=superlink/nodes
        for other in superlink/nodes/silo-*.pub; do [ ! -e "$other" ] || beside=$other; done
        mkdir -p "$node"
        cp superlink/ca.crt "$node/ca.crt"
        [ -e "$node/node.key" ] || ssh-keygen -q -t ecdsa -b 384 -N '' -C "silo-$silo" -f "$node/node.key"
        ssh-keygen -y -f "$node/node.key" > "superlink/nodes/silo-$silo.new"
        like "superlink/nodes/silo-$silo.new" "$beside"
        mv "superlink/nodes/silo-$silo.new" "$public" # whole, since a SuperLink that runs reads it at once
    fi
    silo=$((silo + 1))
done
echo "keys of $silos silos: $folder"
